"""What is inside a wrapped model."""

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside data-parallel wrappers; ``model`` itself if it has none."""
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    return model


def is_part_of(model: nn.Module, whole: nn.Module) -> bool:
    """Whether every parameter of ``model`` is one of ``whole``; that of a wrapper is one of the model inside."""
    return {*map(id, model.parameters())} <= {*map(id, whole.parameters())}
