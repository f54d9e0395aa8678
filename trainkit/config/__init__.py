"""Configs: a CfgNode with trainkit's keys, lengths in iterations or epochs, and constructors that take a config."""

from typing import Any

from trainkit.config.checks import check_values
from trainkit.config.config import CfgNode
from trainkit.config.defaults import get_cfg
from trainkit.config.from_config import configurable
from trainkit.config.instantiate import instantiate
from trainkit.config.lengths import LENGTH_KEYS, Epochs, parse_length, resolve_lengths
from trainkit.config.projects import choose, import_modules, prepare_projects
from trainkit.utils.errors import ConfigError
from trainkit.utils.plugins import lent_names, lent_object

__all__ = [
    "get_cfg",
    "CfgNode",
    "ConfigError",
    "configurable",
    "import_modules",
    "prepare_projects",
    "choose",
]
__all__ += [
    "check_values",
    "Epochs",
    "parse_length",
    "resolve_lengths",
    "LENGTH_KEYS",
    "instantiate",
]


def __getattr__(name: str) -> Any:
    return lent_object(__name__, name)


def __dir__() -> list[str]:
    return [*globals(), *lent_names(__name__)]
