"""The modules and buffers of a model."""

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside data-parallel wrappers; ``model`` itself if it has no wrapper."""
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    return model


def is_part_of(model: nn.Module, whole: nn.Module) -> bool:
    """Whether every parameter of ``model`` is a parameter of ``whole``, as for a model and its wrapper."""
    return {*map(id, model.parameters())} <= {*map(id, whole.parameters())}
