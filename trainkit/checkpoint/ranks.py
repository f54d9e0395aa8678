"""State that differs between ranks, gathered into the one file of a checkpoint."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.checkpoint.atomic import CheckpointError
from trainkit.checkpoint.file import ORDINARY, plain_state
from trainkit.utils import comm
from trainkit.utils.device import new_event, runs_ahead, wait_for

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


def gather_rank_states(
    state: Mapping[str, Any], model: nn.Module, keys: Mapping[str, Iterable[str]]
) -> list[Any]:
    """Each data rank's own part of the state, on rank 0; every rank calls it.

    The own part is the buffers of the model (ranks see different batches), and for each key of ``state`` the entries
    that ``keys`` names. Tensors equal to those of rank 0 are not sent; they become the same objects, so that the file
    holds them once.
    """
    buffers = [name for name, _ in model.named_buffers()]
    keys = {**dict.fromkeys(("model", "trained_model"), buffers), **keys}
    mine = {
        key: {name: state[key][name] for name in keys[key] if name in state[key]}
        for key in keys
        if key in state
    }
    tensors: dict[str, Tensor] = {}

    def keep(tensor: Tensor, path: str) -> Tensor:
        if path in tensors:
            raise ValueError(
                f"two entries of the state have the path '{path}'; give one of them another name"
            )
        # empty in place of a tensor that the format of the checkpoint stores in parts
        is_whole = type(tensor) in ORDINARY
        tensors[path] = (
            tensor.detach()
            if is_whole
            else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        )
        return tensors[path]

    mine = plain_state(mine, take=keep)
    on_host = {
        k: x if x.is_meta else x.to("cpu", non_blocking=runs_ahead(x.device))
        for k, x in tensors.items()
    }
    for device in filter(runs_ahead, {x.device for x in tensors.values()}):
        wait_for(new_event(device))  # once for all copies
    digests = {path: digest_of(tensor) for path, tensor in on_host.items()}
    known, same = comm.broadcast(digests), torch.empty(0, device="meta")
    mine = plain_state(
        mine, take=lambda x, path: same if known.get(path) == digests[path] else on_host[path]
    )
    parts = comm.gather(mine)[:: comm.get_data_group_size()]
    return [
        plain_state(part, take=lambda x, path: tensors[path] if x.is_meta else x) for part in parts
    ]


def take_rank_state(state: dict[str, Any], parts: Any, path: str) -> None:
    """Put this rank's own part into ``state``, which has rank 0's part."""
    num = comm.get_data_world_size()
    trainer = state.get("trainer")
    saved = trainer.get("world_size", num) if isinstance(trainer, Mapping) else num
    if parts is not None and len(parts) == num:
        for key, part in parts[comm.get_data_rank()].items():
            if isinstance(state.get(key), dict):
                state[key].update(part)
    elif parts is None and num > 1 and saved == num:
        _logger.warning("'%s' holds no states of several ranks; each takes those of rank 0", path)


def together(call: Callable[[], _T], group: "dist.ProcessGroup | None" = None) -> _T:
    """Make a call on every rank; if it fails on one, raise on all, so that no rank waits for ever."""
    if comm.get_world_size() == 1:
        return call()
    error, result = "", None
    try:
        result = call()
    except OSError as failure:  # a CheckpointError is an OSError
        error = str(failure)
    errors = comm.all_gather(error, group=group)
    if any(errors):
        raise CheckpointError(
            "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text)
        )
    return result  # type: ignore[return-value]


def digest_of(tensor: Tensor) -> tuple[Any, ...]:
    """dtype, shape, and a digest of the content, of which a tensor on the meta device has none."""
    content = (
        b""
        if tensor.is_meta
        else tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    )
    return tensor.dtype, tensor.shape, hashlib.blake2b(content, digest_size=16).digest()
