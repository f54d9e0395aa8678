"""Transforms of samples by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

from trainkit.config.config import CfgNode
from trainkit.config.errors import look_up
from trainkit.utils.registry import Registry

__all__ = ["TRANSFORM_REGISTRY", "build_transform"]

TRANSFORM_REGISTRY = Registry("TRANSFORM")
"""Classes or functions that are called with ``cfg`` and give a function sample -> sample.

A training transform may give None to have another sample in its place.
"""


def build_transform(cfg: CfgNode, is_train: bool) -> Callable[[Any], Any] | None:
    """Build what ``cfg.INPUT.TRAIN_TRANSFORM`` or ``cfg.INPUT.TEST_TRANSFORM`` names; None where the name is empty.

    Raises:
        ConfigError: nothing is registered under that name.
        TypeError: the registered entry gave something that cannot be called.
    """
    key = "TRAIN_TRANSFORM" if is_train else "TEST_TRANSFORM"
    name = cfg.INPUT[key]
    if not name:
        return None
    transform = look_up(TRANSFORM_REGISTRY, name, f"INPUT.{key}")(cfg)
    if not callable(transform):
        raise TypeError(
            f"INPUT.{key} {name!r} built a {type(transform).__name__}; "
            "a registered transform is called with cfg and must give a function sample -> sample"
        )
    return transform if is_train else partial(_keep_all, transform, name)


def _keep_all(transform: Callable[[Any], Any], name: str, sample: Any) -> Any:
    """A test transform must not leave samples out: that would change what is measured."""
    sample = transform(sample)
    if sample is None:
        raise ValueError(f"INPUT.TEST_TRANSFORM {name!r} gave None; only a training transform may leave a sample out")
    return sample
