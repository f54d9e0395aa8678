"""Build models by name."""

import torch
from torch import nn

from trainkit.config.config import CfgNode
from trainkit.utils.device import device_of, resolve_device
from trainkit.utils.errors import ConfigError, look_up
from trainkit.utils.registry import Registry

MODEL_REGISTRY = Registry("MODEL")
"""Classes or functions that take ``cfg`` and return an ``nn.Module``."""


def build_model(cfg: CfgNode) -> nn.Module:
    """Build the model ``cfg.MODEL.NAME``, with its initial weights, on ``cfg.MODEL.DEVICE``.

    Raises:
        ConfigError: nothing is registered under the name, or it returns no ``nn.Module``; the
            device is not there.
    """
    name = cfg.MODEL.NAME
    key = "MODEL.NAME" if name else "MODEL.NAME is empty; set it"
    make_model = look_up(MODEL_REGISTRY, name, key, ("cfg",))
    device = device_of_config(cfg)
    model = make_model(cfg)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"MODEL.NAME: {name} must return an nn.Module, got {type(model).__name__}"
        )
    return model.to(device)


def choose_device(cfg: CfgNode) -> None:
    """Replace a MODEL.DEVICE of "auto" in ``cfg`` by the device that is used."""
    if cfg.MODEL.DEVICE == "auto":
        cfg.MODEL["DEVICE"] = str(resolve_device("auto"))  # by item: the config may be frozen


def device_of_config(cfg: CfgNode) -> torch.device:
    """The device ``cfg.MODEL.DEVICE``; one with a number becomes the current one."""
    try:
        device = resolve_device(cfg.MODEL.DEVICE)
    except ValueError as error:
        raise ConfigError(f"MODEL.DEVICE: {error}") from error
    if device.index is not None and device.type not in ("cpu", "meta"):
        torch.accelerator.set_device_index(device)  # "cuda" without a number now means this device
    return device


def on_device(cfg: CfgNode, model: nn.Module) -> nn.Module:
    """Move a model from the CPU to ``cfg.MODEL.DEVICE``.

    A model that is on an accelerator stays where it is.
    """
    device = device_of(model)
    if device is not None and device.type == "cpu":
        return model.to(device_of_config(cfg))
    return model
