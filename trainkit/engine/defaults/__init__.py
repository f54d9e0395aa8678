"""A job from a config: the default trainer, its set-up and its folders; evaluation alone."""

from trainkit.engine.defaults.setup import (
    default_argument_parser,
    default_setup,
    default_writers,
)
from trainkit.engine.defaults.trainer import DefaultTrainer
from trainkit.engine.parallel import create_ddp_model
from trainkit.utils.plugins import lending

# includes names that detectron2 users import from here
__all__ = [
    "DefaultTrainer",
    "create_ddp_model",
    "default_argument_parser",
    "default_setup",
    "default_writers",
]

__getattr__, __dir__ = lending(__name__)
