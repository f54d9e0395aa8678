"""Checks before training that a model has the attributes that a hook needs."""

from operator import attrgetter
from typing import Any

from trainkit.config import ConfigError
from trainkit.engine import HookBase
from trainkit.utils.device import unwrap_model


def check_count(name: str, count: int, minimum: int = 1) -> int:
    """Raises ValueError if the argument ``name`` is not a whole number, or below ``minimum``."""
    if not isinstance(count, int) or isinstance(count, bool) or count < minimum:
        raise ValueError(f"{name} must be a whole number >= {minimum}, got {count!r}")
    return count


def model_of(hook: HookBase, *needed: str, whole: bool = False) -> Any:
    """The model that ``hook`` is trained with, without wrappers.

    Args:
        needed: paths of attributes that the model must have, such as "head.loss.queue".
        whole: the hook needs the whole model.

    Raises:
        ConfigError: an attribute is missing, or the model is sharded and must not be.
    """
    model, name = unwrap_model(hook.trainer.model), type(hook).__name__
    for path in needed:
        try:
            attrgetter(path)(model)
        except AttributeError as error:
            raise ConfigError(f"{name} needs {path} of the model, see its docstring: {error}") from error
    if whole and hasattr(model, "set_requires_gradient_sync"):
        raise ConfigError(f'MODEL.PARALLEL is "fsdp", but {name} does not work with a sharded model; make it "ddp"')
    return model
