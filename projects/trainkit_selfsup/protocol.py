"""Checks before training that a model has the attributes that a hook needs."""

from typing import Any, Literal, TypeAlias, TypeGuard

from torch import Tensor

from trainkit.config import ConfigError
from trainkit.engine import HookBase
from trainkit.utils.device import unwrap_model

Kind: TypeAlias = Literal["a number", "a method", "a tensor", "an attribute"]

_ABSENT = object()


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_count(name: str, count: int, minimum: int = 1) -> int:
    """
    Raises:
        ValueError: the argument ``name`` is not a whole number, or below ``minimum``.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < minimum:
        raise ValueError(f"{name} must be a whole number >= {minimum}, got {count!r}")
    return count


def model_of(hook: HookBase, needed: dict[str, Kind]) -> Any:
    """The model that ``hook`` is trained with, without wrappers.

    Args:
        needed: path of an attribute, such as "head.loss.queue" -> the kind of value that it must have.

    Raises:
        ConfigError: an attribute is missing or of another kind.
    """
    model: Any = unwrap_model(hook.trainer.model)
    for path, kind in needed.items():
        value = model
        for name in path.split("."):
            value = getattr(value, name, _ABSENT)
        if not _is(kind, value):
            found = "has none" if value is _ABSENT else f"has {value!r:.60}"
            raise ConfigError(
                f"{type(hook).__name__} needs {kind} {path} of the model, but {type(model).__name__} {found}; its "
                f"docstring says what the model must have"
            )
    return model


def _is(kind: Kind, value: object) -> bool:
    match kind:
        case "a number":
            return is_number(value)
        case "a method":
            return callable(value)
        case "a tensor":
            return isinstance(value, Tensor)
    return value is not _ABSENT


def refuse_sharded(hook: HookBase, model: Any) -> None:
    """Raises ConfigError if the model is sharded: ``hook`` needs the whole model."""
    if hasattr(model, "set_requires_gradient_sync"):
        raise ConfigError(
            f'MODEL.PARALLEL is "fsdp", but {type(hook).__name__} does not work with a sharded model; make it "ddp"'
        )
