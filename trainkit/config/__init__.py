"""Configs: a CfgNode with trainkit's keys, and constructors that take a config.

Lengths are in iterations or epochs.
"""

from trainkit.config.checks import check_values
from trainkit.config.config import CfgNode
from trainkit.config.defaults import get_cfg
from trainkit.config.from_config import configurable
from trainkit.config.instantiate import instantiate
from trainkit.config.lengths import LENGTH_KEYS, Epochs, parse_length, resolve_lengths
from trainkit.config.projects import choose, import_modules, prepare_projects
from trainkit.utils.errors import ConfigError
from trainkit.utils.plugins import lending

__all__ = [
    "get_cfg",
    "CfgNode",
    "ConfigError",
    "configurable",
    "import_modules",
    "prepare_projects",
    "choose",
    "check_values",
    "Epochs",
    "parse_length",
    "resolve_lengths",
    "LENGTH_KEYS",
    "instantiate",
]

__getattr__, __dir__ = lending(__name__)
