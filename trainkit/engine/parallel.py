"""One model on many ranks."""

import copy
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from trainkit.utils import comm
from trainkit.utils.device import device_of, uuid_of
from trainkit.utils.env import preserve_rng_state
from trainkit.utils.errors import ConfigError, add_line
from trainkit.utils.events import EventStorage

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, Tensor, type(None))

# in DDP's error; their order is that of the parameters that it exchanges
_UNUSED_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")


def check_own_device(model: nn.Module) -> None:
    """Check that no two ranks have their models on one accelerator; every rank calls it.

    Devices are compared by their UUID, not by their number: SLURM may show each task one device, as
    number 0. Ranks on the CPU may be as many as you like.

    Raises:
        ConfigError: two ranks have; on all ranks.
    """
    device = device_of(model)
    own_uuid = None if device is None else uuid_of(device)
    ranks_by_uuid: dict[str, list[int]] = {}
    for rank, uuid in enumerate(comm.all_gather(own_uuid)):
        if uuid is not None:
            ranks_by_uuid.setdefault(uuid, []).append(rank)
    for uuid, ranks in ranks_by_uuid.items():
        if len(ranks) > 1:
            raise ConfigError(
                f"the ranks {ranks} are on one accelerator, with the UUID {uuid}; accepted: one "
                "rank on each. Start as many processes as the machine has devices (torchrun "
                "--nproc-per-node, --num-gpus), or set MODEL.DEVICE cpu"
            )


def create_ddp_model(
    model: nn.Module,
    *,
    fp16_compression: bool = False,
    bf16_compression: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """Wrap a model in DistributedDataParallel; with one process return it unchanged.

    Args:
        fp16_compression: exchange the gradients in float16.
        bf16_compression: exchange the gradients in bfloat16, by NCCL or XCCL.
        kwargs: further arguments of ``DistributedDataParallel``.

    Raises:
        ConfigError: two ranks are on one accelerator.
    """
    if comm.get_world_size() == 1:
        return model
    check_own_device(model)
    device = device_of(model)
    if device is not None and device.type != "cpu":
        kwargs.setdefault("device_ids", [device])
    if "broadcast_buffers" in kwargs:
        kwargs["forward_sync_buffers"] = kwargs.pop("broadcast_buffers")  # its new name in torch
    ddp = DistributedDataParallel(model, **kwargs)
    if fp16_compression:
        ddp.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)
    elif bf16_compression:
        ddp.register_comm_hook(state=None, hook=default_hooks.bf16_compress_hook)
    return ddp


def without_gradient_sync(model: nn.Module) -> AbstractContextManager[Any]:
    """Context in which backward passes add up gradients on each rank.

    The next backward pass after it averages them over ranks.
    """
    if hasattr(model, "set_requires_gradient_sync"):  # torch's fully_shard
        return _without_reduction(model)
    if hasattr(model, "no_sync"):  # DDP
        return model.no_sync()  # type: ignore[operator]
    return nullcontext()


@contextmanager
def _without_reduction(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def settle_buckets(model: nn.Module, batch: Any, loss_of: Callable[[Any], Tensor]) -> None:
    """Do two backward passes of DDP without effect before the first step.

    - After its first backward pass DDP reorders its buckets, so three or more ranks add gradients
      in a different order. A resumed run would use the first order in a step for which the original
      run used the second. A static graph is recorded in the first pass, which fails under
      ``no_sync``; its order is fixed after the second.
    - If ranks use different parameters, DDP raises in the second forward pass, on a rank that has
      not exchanged all gradients of the first. The other ranks still wait for them, so nothing else
      may be exchanged in between.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    # the storage takes what the model puts in these passes
    with preserve_rng_state(), EventStorage(), _unchanged(model):
        for _ in range(2):
            loss_of(copy.deepcopy(batch)).backward()
    model.zero_grad()


@contextmanager
def _unchanged(model: DistributedDataParallel) -> Iterator[None]:
    """Context that restores the buffers of a model, and what its modules keep in plain attributes.

    These are tensors, numbers, texts, and lists, tuples, dicts and deques of them.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    # not those of DDP itself, which has recorded the first pass
    own_modules = list(model.module.modules())
    attributes = [_plain_attributes(module) for module in own_modules]
    yield
    for name, buffer in model.named_buffers():
        if name in buffers:  # else it is new
            buffer.copy_(buffers[name])
    for module, former in zip(own_modules, attributes, strict=True):
        for name, (value, content) in former.items():
            _restore(value, content)
            setattr(module, name, value)


def _restore(value: Any, content: Any) -> None:
    """Give a tensor or a container its former content back, in place."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(content)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(content)
    elif isinstance(value, dict):
        value.clear()
        value.update(content)


def _plain_attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """name -> the value of an attribute, and a copy of its content."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(module).items():
        if name in _OF_EVERY_MODULE:
            continue
        items: Iterable[Any] = [value]
        if isinstance(value, dict):
            items = value.values()
        elif isinstance(value, list | tuple | deque):
            items = value
        if all(isinstance(item, _PLAIN) for item in items):
            found[name] = (value, copy.deepcopy(value))
    return found


def explain_unused_parameters(model: nn.Module, error: Exception) -> None:
    """Add the names of the parameters and the setting to DDP's error on missing gradients.

    Other errors stay as they are.
    """
    found = _UNUSED_INDICES.search(str(error))
    if found is None or not isinstance(model, DistributedDataParallel):
        return
    exchanged = []
    for name, value in model.module.named_parameters():
        if value.requires_grad and name not in model.parameters_to_ignore:
            exchanged.append((name, value))
    indices = [int(index) for index in found[1].split()]
    unused = [exchanged[index] for index in indices if index < len(exchanged)]
    has_all = len(unused) == len(indices)
    if has_all and all(value.grad is None for _, value in unused):
        names = ", ".join(name for name, _ in unused)
    else:
        names = "parameters that were frozen after DDP had wrapped the model; freeze them before"
    add_line(
        error,
        f"The last backward pass of rank {comm.get_rank()} gave no gradient to: {names}. "
        "If ranks or steps use different parameters, set MODEL.DDP.FIND_UNUSED_PARAMETERS True, or "
        "create_ddp_model(model, find_unused_parameters=True)",
    )
