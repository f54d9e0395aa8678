"""Models by name."""

import torch
from torch import nn

from trainkit.config.checks import check_is_ours
from trainkit.config.config import CfgNode
from trainkit.config.errors import ConfigError, look_up
from trainkit.utils.device import use_device
from trainkit.utils.registry import Registry

__all__ = ["MODEL_REGISTRY", "build_model"]

MODEL_REGISTRY = Registry("MODEL")
"""Classes or functions that are called with ``cfg`` and give an ``nn.Module``."""


def device_of_config(cfg: CfgNode) -> torch.device:
    """The device that ``cfg.MODEL.DEVICE`` names; with a number it becomes the current one.

    Raises:
        ConfigError: the machine lacks it.
    """
    try:
        return use_device(cfg.MODEL.DEVICE)
    except ValueError as error:
        raise ConfigError(f"MODEL.DEVICE: {error}") from error


def build_model(cfg: CfgNode) -> nn.Module:
    """Build the model that ``cfg.MODEL.NAME`` names, on the device that ``cfg.MODEL.DEVICE`` names.

    Weights are those of its constructor; ``cfg.MODEL.WEIGHTS`` is the checkpointer's.

    Raises:
        ConfigError: ``cfg.MODEL.NAME`` is empty, or nothing is registered under it; the machine lacks the device; the
            registered entry cannot be called with ``cfg`` alone, or gives something that is no ``nn.Module``.
    """
    check_is_ours(cfg)
    name = cfg.MODEL.NAME
    if not name:
        registered = ", ".join(sorted(entry for entry, _ in MODEL_REGISTRY)) or "none"
        raise ConfigError(
            f"MODEL.NAME is empty; set it to a model in MODEL_REGISTRY (registered: {registered}). "
            "A module that registers models is named in IMPORTS"
        )
    entry = look_up(MODEL_REGISTRY, name, "MODEL.NAME")
    device = device_of_config(cfg)
    maker = f"{entry.__module__}.{entry.__qualname__}, registered as MODEL.NAME {name!r}"
    try:
        model = entry(cfg)
    except TypeError as error:
        if error.__traceback__ and error.__traceback__.tb_next:  # from the code of the model
            raise
        raise ConfigError(f"{maker}, must take the config as its one argument: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{maker}, must return an nn.Module, got {type(model).__name__}")
    return model.to(device)
