"""One model on many ranks."""

import inspect
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from trainkit.config import CfgNode, ConfigError
from trainkit.utils import comm
from trainkit.utils.device import device_of


def create_ddp_model(
    model: nn.Module, *, fp16_compression: bool = False, bf16_compression: bool = False, **kwargs: Any
) -> nn.Module:
    """Wrap a model in DistributedDataParallel; with one process it comes back as it is.

    Args:
        fp16_compression: exchange the gradients in float16; ``bf16_compression``: in bfloat16.
        kwargs: further arguments of ``DistributedDataParallel``.

    Raises:
        ConfigError: torch here cannot exchange bfloat16; it needs CUDA with NCCL, or XPU with XCCL.
        ValueError: both compressions.
    """
    if fp16_compression and bf16_compression:
        raise ValueError("fp16_compression and bf16_compression are both True; set one of them")
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
    if bf16_compression:
        try:
            ddp.register_comm_hook(state=None, hook=default_hooks.bf16_compress_hook)
        except TypeError as error:
            raise ConfigError(
                "torch refuses bf16_compression (MODEL.DDP.COMPRESSION bf16) here; use fp16, or none: " + str(error)
            ) from error
    return ddp


def ddp_options(cfg: CfgNode) -> dict[str, Any]:
    """MODEL.DDP as arguments of `create_ddp_model`."""
    options = cfg.MODEL.DDP
    return {
        "broadcast_buffers": options.BROADCAST_BUFFERS,
        "find_unused_parameters": options.FIND_UNUSED_PARAMETERS,
        "gradient_as_bucket_view": options.GRADIENT_AS_BUCKET_VIEW,
        "static_graph": options.STATIC_GRAPH,
        "fp16_compression": options.COMPRESSION == "fp16",
        "bf16_compression": options.COMPRESSION == "bf16",
    }
