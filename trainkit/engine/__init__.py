"""The loop, the trainers, hooks, and the default trainer."""

from trainkit.engine import hooks
from trainkit.engine.amp import AMPTrainer
from trainkit.engine.defaults import DefaultTrainer
from trainkit.engine.defaults.hooks import ConfiguredHooks as ConfiguredHooks
from trainkit.engine.defaults.run import EvaluationRun, run
from trainkit.engine.defaults.setup import (
    default_argument_parser,
    default_setup,
    default_writers,
    user_errors_exit,
)
from trainkit.engine.hook_base import HookBase, Priority
from trainkit.engine.hooks import (  # noqa: F401  - from here too, as in detectron2
    HOOK_REGISTRY,
    BestCheckpointer,
    CallbackHook,
    EarlyStopping,
    EvalHook,
    FinalEvalHook,
    IterationTimer,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
    check_period,
    is_due,
    is_last,
    is_nth,
)
from trainkit.engine.launch import DEFAULT_TIMEOUT, is_restarted, launch
from trainkit.engine.loop import TrainerBase
from trainkit.engine.parallel import create_ddp_model
from trainkit.engine.step import SimpleTrainer
from trainkit.utils.plugins import lending

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
__all__ += ["DEFAULT_TIMEOUT", "create_ddp_model", "is_restarted"]

__getattr__, __dir__ = lending(__name__)
