"""Errors in a config, and lines that are added to errors of others."""

import inspect
from collections.abc import Iterable
from typing import Any

from trainkit.utils.registry import Registry, did_you_mean


class ConfigError(ValueError):
    """An error in a config; the message has the key, the value and the accepted values."""


class UnknownKeyError(ConfigError, KeyError):
    """The config has no such key; this is a KeyError too, as in detectron2."""

    __str__ = ConfigError.__str__  # KeyError's __str__ quotes the message


def not_accepted(key: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"{key}: got {value!r:.200} ({type(value).__name__}); accepted: {accepted}")


def unknown_name(where: str, name: object, accepts: str, accepted: Iterable[str]) -> ConfigError:
    names = sorted(accepted)
    return ConfigError(
        f"{where}: unknown {name!r}; {did_you_mean(name, names)}{accepts}: {', '.join(names)}"
    )


def add_line(error: BaseException, line: str) -> None:
    """Add a line to the message of an error, which keeps its type and its traceback."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{line}",)


def look_up(registry: Registry, name: str, key: str, called_with: Iterable[str] = ()) -> Any:
    """The object that ``key`` of a config names.

    Args:
        called_with: what its arguments are, if it is called; for the check and its message.

    Raises:
        ConfigError: nothing is registered under the name, or it takes other arguments.
    """
    try:
        found = registry.get(name)
    except KeyError as error:
        raise ConfigError(f"{key}: {error.args[0]}") from error
    arguments = [*called_with]
    if arguments:
        _check_call(found, arguments, f"{key}: {name}")
    return found


def _check_call(function: Any, arguments: list[str], where: str) -> None:
    """Raises ConfigError if the function does not take these positional arguments."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # configurable() wraps
    except (TypeError, ValueError):  # some functions in C have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{where} is called with ({', '.join(arguments)}), but takes {signature}"
        ) from error
