"""Build transforms of samples by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

from trainkit.config.config import CfgNode
from trainkit.config.errors import look_up
from trainkit.utils.registry import Registry

TRANSFORM_REGISTRY = Registry("TRANSFORM")
"""Classes or functions that take ``cfg`` and return a function sample -> sample.

If a training transform returns None, another sample is used instead.
"""


def build_transform(cfg: CfgNode, is_train: bool) -> Callable[[Any], Any] | None:
    """Build ``cfg.INPUT.TRAIN_TRANSFORM`` or ``cfg.INPUT.TEST_TRANSFORM``; None if the name is empty.

    Raises:
        ConfigError: nothing is registered under this name.
        TypeError: the registered entry returned something that cannot be called.
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
    """Apply a test transform; leaving out a sample is an error, since it would change the results."""
    sample = transform(sample)
    if sample is None:
        raise ValueError(f"INPUT.TEST_TRANSFORM {name!r} gave None; only a training transform may leave a sample out")
    return sample
