"""The modules and buffers of a model."""

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside data-parallel wrappers; ``model`` itself if it has no wrapper."""
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    return model


def is_part_of(model: nn.Module, whole: nn.Module) -> bool:
    """Whether every parameter of ``model`` is a parameter of ``whole``, as for a model and its wrapper."""
    return {*map(id, model.parameters())} <= {*map(id, whole.parameters())}


def put_buffer(model: nn.Module, path: str, buffer: Tensor) -> None:
    """Register ``buffer`` as a persistent buffer of ``model``, in place of an existing attribute."""
    owner_path, _, name = path.rpartition(".")
    owner = model.get_submodule(owner_path)
    if hasattr(owner, name):
        delattr(owner, name)  # torch refuses to register a name that is a plain attribute
    owner.register_buffer(name, buffer)
