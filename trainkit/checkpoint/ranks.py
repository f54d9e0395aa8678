"""State that differs between ranks, gathered into the one file of a checkpoint."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.checkpoint.atomic import CheckpointError
from trainkit.checkpoint.state import ORDINARY
from trainkit.utils import comm

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_PIECE, _ODD = 1 << 20, 0x1E3779B97F4A7C15


class _Same:
    """Replaces a tensor that equals rank 0's tensor at the same path."""


def gather_rank_states(state: Mapping[str, Any], model: nn.Module, keys: Mapping[str, Iterable[str]]) -> list[Any]:
    """Each data rank's own part of the state, on rank 0; every rank calls it.

    The own part is the buffers of the model (ranks see different batches), and for each key of ``state`` the entries
    that ``keys`` names. Tensors equal to those of rank 0 are not sent; they become the same objects, so that the file
    holds them once.
    """
    buffers = [name for name, _ in model.named_buffers()]
    keys = {**dict.fromkeys(("model", "trained_model"), buffers), **keys}
    mine = {key: {name: state[key][name] for name in keys[key] if name in state[key]} for key in keys if key in state}
    tensors: dict[str, Tensor] = {}
    mine = _map_tensors(mine, lambda path, tensor: tensors.setdefault(path, _without_parts(tensor)))
    digests = digests_of(tensors)
    known = comm.broadcast(digests)
    if not comm.is_main_process():
        mine = _map_tensors(mine, lambda path, x: _Same() if known.get(path) == digests[path] else x.cpu())
    parts = comm.gather(None if comm.is_main_process() else mine)[:: comm.get_data_group_size()]
    take = partial(_map_tensors, change=lambda path, x: tensors[path] if isinstance(x, _Same) else x)
    return [mine if part is None else take(part) for part in parts]


def take_rank_state(state: dict[str, Any], parts: Any, path: str) -> None:
    """Put this rank's own part into ``state``, which has rank 0's part."""
    num = comm.get_data_world_size()
    if parts is None or len(parts) != num:
        trainer = state.get("trainer")
        if num > 1 and (not isinstance(trainer, dict) or trainer.get("world_size", num) == num):
            _logger.warning("'%s' holds no states of %d ranks; each takes those of rank 0", path, num)
        return
    for key, part in parts[comm.get_data_rank()].items():
        if isinstance(state.get(key), dict):
            state[key].update(part)


def together(call: Callable[[], _T], group: "dist.ProcessGroup | None" = None) -> _T:
    """Make a call on every rank; if it fails on one, raise on all, so that no rank waits for ever."""
    error, result = "", None
    try:
        result = call()
    except OSError as failure:  # a CheckpointError is an OSError
        error = str(failure)
    errors = comm.all_gather(error, group=group)
    if any(errors):
        ranks = [f"rank {rank}: " * (len(errors) > 1) for rank in range(len(errors))]
        raise CheckpointError("; ".join(rank + failed for rank, failed in zip(ranks, errors, strict=True) if failed))
    return cast(_T, result)


def _without_parts(tensor: Tensor) -> Tensor:
    """An empty tensor in place of one that the format of the checkpoint stores in parts."""
    if type(tensor) in ORDINARY:
        return tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """dtype, shape and a number for the content of each tensor; each device is waited for once."""
    numbers = {path: _number_of(tensor) for path, tensor in tensors.items()}
    found: dict[str, tuple[Any, ...]] = {}
    for device in {number.device for number in numbers.values()}:
        paths = [path for path, number in numbers.items() if number.device == device]
        values = torch.stack([numbers[path] for path in paths]).tolist()
        found |= {p: (tensors[p].dtype, tensors[p].shape, value) for p, value in zip(paths, values, strict=True)}
    return found


def _number_of(tensor: Tensor) -> Tensor:
    """A 64-bit number for the content, computed on the tensor's device, so that large tensors are not copied."""
    total = torch.zeros((), dtype=torch.int64, device="cpu" if tensor.is_meta else tensor.device)
    if tensor.is_meta or not tensor.numel():
        return total
    numbers = tensor.contiguous().reshape(-1).view(torch.uint8)
    numbers = numbers.view(torch.int32) if len(numbers) % 4 == 0 else numbers
    for piece in numbers.split(_PIECE):
        # the sum of products with weights that look random, modulo 2**64; order and position count
        weights = torch.arange(1, len(piece) + 1, device=tensor.device) * _ODD
        weights = (weights ^ (weights >> 29)) * _ODD
        total = total * _ODD + (piece * weights).sum()
    return total


def _map_tensors(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """A copy of nested dicts, lists and tuples with ``change(path, leaf)`` for each tensor or `_Same`."""
    if isinstance(value, Tensor | _Same):
        return change(path, value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(item, change, f"{path}.{key!r}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(item, change, f"{path}.{i}") for i, item in enumerate(value))
    return value
