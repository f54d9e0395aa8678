"""The loop, the trainers, hooks, and the default trainer."""

from typing import TYPE_CHECKING

import trainkit.engine.launch  # noqa: F401 - now: later it would hide the function of this name
from trainkit.utils.loading import names_on_demand

if TYPE_CHECKING:
    from trainkit.engine import hooks
    from trainkit.engine.amp import AMPTrainer
    from trainkit.engine.defaults import DefaultTrainer
    from trainkit.engine.entry import EvaluationRun, run
    from trainkit.engine.hook_base import HookBase, Priority
    from trainkit.engine.hooks import *  # noqa: F403 - from here too, as in detectron2
    from trainkit.engine.loop import TrainerBase
    from trainkit.engine.parallel import create_ddp_model
    from trainkit.engine.process import DEFAULT_TIMEOUT, is_restarted, launch
    from trainkit.engine.setup import (
        default_argument_parser,
        default_setup,
        default_writers,
        user_errors_exit,
    )
    from trainkit.engine.step import SimpleTrainer

_OF_PROJECTS = ["DefaultPredictor", "GraphTrainer", "GraphAMPTrainer", "fast_dev_config"]

__all__ = [
    "DefaultTrainer",
    "EvaluationRun",
    "TrainerBase",
    "SimpleTrainer",
    "AMPTrainer",
    "HookBase",
    "Priority",
]
__all__ += [
    "hooks",
    "default_argument_parser",
    "default_setup",
    "user_errors_exit",
    "default_writers",
    "launch",
    "run",
]
__all__ += ["DEFAULT_TIMEOUT", "create_ddp_model", "is_restarted", *_OF_PROJECTS]

del launch  # the module
__getattr__ = names_on_demand(__name__, *_OF_PROJECTS)
