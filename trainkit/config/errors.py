"""Mistakes in a config."""

from collections.abc import Iterable
from typing import Any

from trainkit.utils.registry import Registry, did_you_mean


class ConfigError(ValueError):
    """A mistake in a config; the message names the key, the value received, what is accepted and the remedy."""


class UnknownKeyError(ConfigError, KeyError):
    """A key that the config does not have; a KeyError too, as in detectron2."""

    __str__ = ConfigError.__str__  # that of KeyError quotes the message


def unknown_name(where: str, name: object, accepts: str, accepted: Iterable[str]) -> ConfigError:
    names = sorted(accepted)
    return ConfigError(f"{where}: unknown {name!r}; {did_you_mean(name, names)}{accepts}: {', '.join(names)}")


def look_up(registry: Registry, name: str, key: str) -> Any:
    """What ``key`` of a config names.

    Raises:
        ConfigError: nothing is registered under the name.
    """
    try:
        return registry.get(name)
    except KeyError as error:
        raise ConfigError(f"{key}: {error.args[0]}") from error
