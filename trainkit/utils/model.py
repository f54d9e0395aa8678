"""What is inside a wrapped model."""

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside data-parallel wrappers; ``model`` itself if it has none."""
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    return model
