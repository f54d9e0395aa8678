"""Build models by name, and train models that return logits."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.config.checks import check_is_ours
from trainkit.config.config import CfgNode
from trainkit.config.errors import ConfigError, look_up
from trainkit.utils.device import device_of, resolve_device
from trainkit.utils.registry import Registry

__all__ = ["MODEL_REGISTRY", "build_model", "losses_from"]

MODEL_REGISTRY = Registry("MODEL")
"""Classes or functions that take ``cfg`` and return an ``nn.Module``."""


def device_of_config(cfg: CfgNode) -> torch.device:
    """The device ``cfg.MODEL.DEVICE``; a device with a number becomes the current one.

    Raises:
        ConfigError: the machine does not have it.
    """
    try:
        device = resolve_device(cfg.MODEL.DEVICE)
        if device.type == "cpu" and device.index:
            raise ValueError(f"there is one cpu, got {cfg.MODEL.DEVICE!r}")
    except ValueError as error:
        raise ConfigError(f"MODEL.DEVICE: {error}") from error
    if device.index is not None and device.type not in ("cpu", "meta"):
        torch.accelerator.set_device_index(device)  # "cuda" without a number now means this device
    return device


def on_device(cfg: CfgNode, model: nn.Module) -> nn.Module:
    """Move a model from the CPU to ``cfg.MODEL.DEVICE``; a model that is on an accelerator stays where it is."""
    device = device_of(model)
    return model.to(device_of_config(cfg)) if device is not None and device.type == "cpu" else model


def build_model(cfg: CfgNode) -> nn.Module:
    """Build the model ``cfg.MODEL.NAME`` on the device ``cfg.MODEL.DEVICE``.

    The model has its initial weights; the checkpointer loads ``cfg.MODEL.WEIGHTS``.

    Raises:
        ConfigError: ``cfg.MODEL.NAME`` is empty, or nothing is registered under it; the machine does not have the
            device; the registered entry does not take ``cfg`` alone, or returns no ``nn.Module``.
    """
    check_is_ours(cfg)
    name = cfg.MODEL.NAME
    entry = look_up(MODEL_REGISTRY, name, "MODEL.NAME" if name else "MODEL.NAME is empty; set it")
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


def _split(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        inputs = dict(batch)
        target = inputs.pop("label" if "label" in inputs else "labels", None)
        return inputs if len(inputs) > 1 else [*inputs.values()], target
    tensors = [batch] if isinstance(batch, Tensor) else batch
    if isinstance(tensors, list | tuple) and tensors and all(isinstance(entry, Tensor) for entry in tensors):
        return tensors[:-1] or tensors, tensors[-1]
    raise TypeError(
        "losses_from takes batches that are a mapping, a tensor, or a tuple or list of tensors, got "
        f"{type(batch).__name__}; give it a function split(batch) that returns (inputs, target)"
    )


def losses_from(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    split: Callable[[Any], tuple[Any, Any]] = _split,
) -> nn.Module:
    """Let a model that returns logits take whole batches: it then returns losses in train mode, logits in eval mode.

    If the model returns an object with ``logits``, as in Hugging Face, its output is these logits. Calls with several
    arguments, or with arguments by name, are not changed.

    Args:
        model: changed in place and returned; it gets a subclass of its class, so the names in its state stay.
        loss_fn: called with (output, target), gives a loss or a dict of losses; a module is trained and saved too.
            None: ``model`` is called with all entries of the batch by name, and returns an object with ``loss``.
        split: gives (inputs, target) of a batch. Default: the target is the last of several tensors, or ``label`` or
            ``labels`` of a mapping; the other entries are arguments by name (by position if there is only one).
    """
    original = type(model).forward

    def call(self: Any, batch: Any) -> tuple[Any, Any]:
        inputs, target = split(batch)
        returned = original(self, **inputs) if isinstance(inputs, Mapping) else original(self, *inputs)
        return getattr(returned, "logits", returned), target

    def losses(self: Any, batch: Any) -> Any:
        return original(self, **batch).loss if self.trainkit_loss is None else self.trainkit_loss(*call(self, batch))

    @functools.wraps(original)  # generate() of Hugging Face reads the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return original(self, *args, **kwargs)
        return self.losses(*args) if self.training else call(self, *args)[0]

    model.__class__ = type(type(model).__name__, (type(model),), {"forward": forward, "losses": losses})
    model.trainkit_loss = loss_fn  # type: ignore[assignment]
    return model
