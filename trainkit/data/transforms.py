"""Transforms of samples by name."""

from collections.abc import Callable
from typing import Any

from trainkit.config.config import CfgNode, ConfigError
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
    try:
        entry = TRANSFORM_REGISTRY.get(name)
    except KeyError as error:
        raise ConfigError(f"INPUT.{key}: {error.args[0]}") from error
    transform = entry(cfg)
    if not callable(transform):
        raise TypeError(
            f"INPUT.{key} {name!r} built a {type(transform).__name__}; "
            "a registered transform is called with cfg and must give a function sample -> sample"
        )
    return transform if is_train else _RejectsNone(transform, name)


class _RejectsNone:
    """A test transform: a sample that it left out would change what is measured."""

    def __init__(self, transform: Callable[[Any], Any], name: str) -> None:
        self._transform = transform
        self._name = name

    def __call__(self, sample: Any) -> Any:
        sample = self._transform(sample)
        if sample is None:
            raise ValueError(
                f"INPUT.TEST_TRANSFORM {self._name!r} gave None; only a training transform may leave a sample out"
            )
        return sample
