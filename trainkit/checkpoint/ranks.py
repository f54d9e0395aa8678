"""State that differs between ranks, gathered into the one file of a checkpoint."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.checkpoint.errors import CheckpointError
from trainkit.checkpoint.file import ORDINARY, plain_state
from trainkit.utils import comm
from trainkit.utils.device import new_event, runs_ahead, wait_for

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


def gather_rank_states(
    state: Mapping[str, Any], model: nn.Module, keys: Mapping[str, Iterable[str]]
) -> list[Any]:
    """Each data rank's own part of the state, on rank 0; every rank calls it.

    The own part is the buffers of the model (ranks see different batches), and for each key of
    ``state`` the entries that ``keys`` names. Tensors equal to those of rank 0 are not sent; they
    become the same objects, so that the file holds them once.
    """
    # first, note each tensor of this rank by its path
    tensors: dict[str, Tensor] = {}

    def note(tensor: Tensor, path: str) -> Tensor:
        if path in tensors:
            raise ValueError(
                f"two entries of the state have the path '{path}'; give one of them another name"
            )
        if type(tensor) in ORDINARY:
            tensors[path] = tensor.detach()
        else:  # the format of the checkpoint stores this one in parts
            tensors[path] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return tensors[path]

    own_part = plain_state(_own_part(state, model, keys), take=note)
    on_host = _copy_to_host(tensors)

    # then send rank 0 the tensors that differ from its own; in place of others an empty one
    digests = {path: digest_of(tensor) for path, tensor in on_host.items()}
    digests_of_rank_0 = comm.broadcast(digests)
    equal_to_rank_0 = torch.empty(0, device="meta")

    def leave_out_equal(tensor: Tensor, path: str) -> Tensor:
        if digests_of_rank_0.get(path) == digests[path]:
            return equal_to_rank_0
        return on_host[path]

    by_rank = comm.gather(plain_state(own_part, take=leave_out_equal))
    by_data_rank = by_rank[:: comm.get_data_group_size()]

    # on rank 0, put its own tensors in place of the empty ones
    def put_back_equal(tensor: Tensor, path: str) -> Tensor:
        return tensors[path] if tensor.is_meta else tensor

    return [plain_state(part, take=put_back_equal) for part in by_data_rank]


def _own_part(
    state: Mapping[str, Any], model: nn.Module, keys: Mapping[str, Iterable[str]]
) -> dict[str, dict[str, Any]]:
    """The entries of the state that differ between ranks."""
    buffers = [name for name, _ in model.named_buffers()]
    names_of = {"model": buffers, "trained_model": buffers, **keys}
    part = {}
    for key, names in names_of.items():
        if key in state:
            part[key] = {name: state[key][name] for name in names if name in state[key]}
    return part


def _copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, after one wait for all copies; those on the meta device stay."""
    on_host = {}
    for path, tensor in tensors.items():
        if tensor.is_meta:
            on_host[path] = tensor
        else:
            on_host[path] = tensor.to("cpu", non_blocking=runs_ahead(tensor.device))
    devices = {tensor.device for tensor in tensors.values()}
    for device in devices:
        if runs_ahead(device):
            wait_for(new_event(device))
    return on_host


def take_rank_state(state: dict[str, Any], parts: Any, path: str) -> None:
    """Put this rank's own part into ``state``, which has rank 0's part.

    Args:
        parts: of `gather_rank_states`; None: the file has none.
        path: of the file, for a warning.
    """
    world_size = comm.get_data_world_size()
    if parts is None:
        if world_size > 1 and _saved_world_size(state) in (None, world_size):
            _logger.warning(
                "'%s' holds no states of several ranks; each takes those of rank 0", path
            )
    elif len(parts) == world_size:  # else this rank has no part; the trainer says what differs
        own_part = parts[comm.get_data_rank()]
        for key, entries in own_part.items():
            if isinstance(state.get(key), dict):
                state[key].update(entries)


def _saved_world_size(state: Mapping[str, Any]) -> Any:
    """None if the file does not say it."""
    trainer_state = state.get("trainer")
    if not isinstance(trainer_state, Mapping):
        return None
    return trainer_state.get("world_size")


def together(call: Callable[[], _T], group: "dist.ProcessGroup | None" = None) -> _T:
    """Make a call on every rank.

    If it fails on one, raise on all, so that no rank waits for ever.
    """
    if comm.get_world_size() == 1:
        return call()
    result = None
    error = ""
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
    digest = hashlib.blake2b(digest_size=16)
    if not tensor.is_meta:
        values = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return tensor.dtype, tensor.shape, digest.digest()
