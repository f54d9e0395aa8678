"""A job from a config: the default trainer, its set-up, its folders, and evaluation without training."""

from typing import Any

from trainkit.engine.defaults.setup import (
    default_argument_parser,
    default_setup,
    default_writers,
)
from trainkit.engine.defaults.trainer import DefaultTrainer
from trainkit.engine.parallel import create_ddp_model
from trainkit.utils.plugins import lent_names, lent_object

# includes names that detectron2 users import from here
__all__ = [
    "DefaultTrainer",
    "create_ddp_model",
    "default_argument_parser",
    "default_setup",
    "default_writers",
]


def __getattr__(name: str) -> Any:
    return lent_object(__name__, name)


def __dir__() -> list[str]:
    return [*globals(), *lent_names(__name__)]
