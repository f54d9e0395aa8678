"""One model on many ranks."""

import inspect
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from trainkit.utils import comm
from trainkit.utils.device import device_of


def create_ddp_model(model: nn.Module, *, fp16_compression: bool = False, **kwargs: Any) -> nn.Module:
    """Wrap a model in DistributedDataParallel; with one process it comes back as it is.

    Args:
        fp16_compression: exchange the gradients in float16.
        kwargs: further arguments of ``DistributedDataParallel``.
    """
    if comm.get_world_size() == 1:
        return model
    if "device_ids" not in kwargs:
        device = device_of(model)
        kwargs["device_ids"] = None if device is None or device.type == "cpu" else [device]
    known = inspect.signature(DistributedDataParallel).parameters
    if "broadcast_buffers" in kwargs and "forward_sync_buffers" in known:  # its name in newer versions of torch
        kwargs["forward_sync_buffers"] = kwargs.pop("broadcast_buffers")
    ddp = DistributedDataParallel(model, **kwargs)
    if fp16_compression:
        ddp.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)
    return ddp
