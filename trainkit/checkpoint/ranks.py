"""State that differs between ranks, gathered into the one file of a checkpoint."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.checkpoint.atomic import CheckpointError
from trainkit.checkpoint.averaged import TRAINED
from trainkit.checkpoint.state import ORDINARY
from trainkit.utils import comm

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

KEY = "ranks"


class _Same:
    """Replaces a tensor that equals rank 0's tensor at the same path."""


def gather_rank_states(state: Mapping[str, Any], model: nn.Module, keys: Mapping[str, Iterable[str]]) -> list[Any]:
    """Each data rank's own part of the state, on rank 0; every rank calls it.

    The own part is the buffers of the model (ranks see different batches), and for each key of ``state`` the entries
    that ``keys`` names. Tensors equal to those of rank 0 are not sent; they become the same objects, so that the file
    holds them once.
    """
    held = {key: state[key] for key in ("model", TRAINED) if key in state}
    buffers = {key: {name: held[key][name] for name, _ in model.named_buffers() if name in held[key]} for key in held}
    entries = {key: {name: state[key][name] for name in names if name in state[key]} for key, names in keys.items()}
    mine = _map_tensors({**buffers, **entries}, _without_parts)
    own: dict[str, Tensor] = {}  # the tensors of rank 0, by path
    if comm.is_main_process():
        _map_tensors(mine, own.setdefault)
    known = comm.broadcast({path: _digest(tensor) for path, tensor in own.items()})
    if not comm.is_main_process():
        mine = _map_tensors(mine, lambda path, tensor: _Same() if known.get(path) == _digest(tensor) else tensor.cpu())
    parts = comm.gather(None if comm.is_main_process() else mine)[:: comm.get_data_group_size()]
    take = partial(_map_tensors, change=lambda path, value: own[path] if isinstance(value, _Same) else value)
    return [mine if part is None else take(part) for part in parts]


def take_rank_state(state: dict[str, Any], path: str) -> None:
    """Put this rank's own part into ``state``, which has rank 0's part, and remove the parts of all ranks from it."""
    parts = state.pop(KEY, None)
    if parts is not None and not (isinstance(parts, list) and all(isinstance(part, dict) for part in parts)):
        raise CheckpointError(f"'{path}' is damaged: its entry {KEY!r} has to be a list with the states of each rank")
    num = comm.get_data_world_size()
    if parts is None or len(parts) != num:
        if (parts and len(parts)) != num > 1:
            _logger.warning("'%s' holds no states of %d ranks; each takes those of rank 0", path, num)
        return
    for key, part in parts[comm.get_data_rank()].items():
        if isinstance(state.get(key), dict):
            state[key].update(part)


def together(call: Callable[[], _T], group: "dist.ProcessGroup | None" = None, *, is_of_one: bool = False) -> _T:
    """Make a call on every rank; if it fails on one, raise on all, so that no rank waits for ever.

    Args:
        is_of_one: only one rank can fail, so errors need not name the rank.
    """
    error, result = "", None
    try:
        result = call()
    except OSError as failure:  # a CheckpointError is an OSError
        error = str(failure)
        if comm.get_world_size() > 1 and not is_of_one:
            error = f"rank {comm.get_rank()}: {error}"
    if errors := [text for text in comm.all_gather(error, group=group) if text]:
        raise CheckpointError("; ".join(errors))
    return cast(_T, result)


def _without_parts(path: str, tensor: Tensor) -> Tensor:
    """An empty tensor in place of one that the format of the checkpoint stores in parts."""
    ordinary = type(tensor) in ORDINARY
    return tensor if ordinary else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _map_tensors(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """A copy of nested dicts, lists and tuples with ``change(path, leaf)`` for each tensor or `_Same`."""
    if isinstance(value, Tensor | _Same):
        return change(path, value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(item, change, f"{path}.{key!r}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(item, change, f"{path}.{i}") for i, item in enumerate(value))
    return value


def _digest(tensor: Tensor) -> str:
    tensor = tensor.detach() if tensor.is_meta else tensor.detach().cpu().contiguous()
    text = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
    if tensor.numel() and not tensor.is_meta:  # a tensor on the meta device stands for a sharded one
        text.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return text.hexdigest()
