"""Build models by name."""

import torch
from torch import nn

from trainkit.config.checks import check_is_ours
from trainkit.config.config import CfgNode
from trainkit.config.errors import ConfigError, look_up
from trainkit.utils.device import use_device
from trainkit.utils.registry import Registry

__all__ = ["MODEL_REGISTRY", "build_model"]

MODEL_REGISTRY = Registry("MODEL")
"""Classes or functions that take ``cfg`` and return an ``nn.Module``."""


def device_of_config(cfg: CfgNode) -> torch.device:
    """The device ``cfg.MODEL.DEVICE``; a device with a number becomes the current one.

    Raises:
        ConfigError: the machine does not have it.
    """
    try:
        return use_device(cfg.MODEL.DEVICE)
    except ValueError as error:
        raise ConfigError(f"MODEL.DEVICE: {error}") from error


def build_model(cfg: CfgNode) -> nn.Module:
    """Build the model ``cfg.MODEL.NAME`` on the device ``cfg.MODEL.DEVICE``.

    It has its initial weights; the checkpointer loads ``cfg.MODEL.WEIGHTS``.

    Raises:
        ConfigError: ``cfg.MODEL.NAME`` is empty, or nothing is registered under it; the machine does not have the
            device; the registered entry does not take ``cfg`` alone, or returns no ``nn.Module``.
    """
    check_is_ours(cfg)
    name = cfg.MODEL.NAME
    if not name:
        registered = ", ".join(sorted(entry for entry, _ in MODEL_REGISTRY)) or "none"
        raise ConfigError(
            f"MODEL.NAME is empty; set it to a model in MODEL_REGISTRY (registered: {registered}). "
            "Name the module that registers it in IMPORTS"
        )
    entry = look_up(MODEL_REGISTRY, name, "MODEL.NAME")
    device = device_of_config(cfg)
    maker = f"{entry.__module__}.{entry.__qualname__}, registered as MODEL.NAME {name!r}"
    try:
        model = entry(cfg)
    except TypeError as error:
        if error.__traceback__ and error.__traceback__.tb_next:  # the error comes from the model's code
            raise
        raise ConfigError(f"{maker}, must take the config as its one argument: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{maker}, must return an nn.Module, got {type(model).__name__}")
    return model.to(device)
