"""The hooks of trainkit, and the names needed to write one."""

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase, Priority
from trainkit.engine.hooks.callback import CallbackHook
from trainkit.engine.hooks.checkpoint import BestCheckpointer, PeriodicCheckpointer
from trainkit.engine.hooks.early_stopping import EarlyStopping
from trainkit.engine.hooks.evaluation import EvalHook, FinalEvalHook
from trainkit.engine.hooks.lr_scheduler import LRScheduler
from trainkit.engine.hooks.timer import IterationTimer
from trainkit.engine.hooks.writer import PeriodicWriter
from trainkit.utils.periods import check_number, check_period, is_due, is_last, is_nth
from trainkit.utils.plugins import lending

__all__ = [
    "HookBase",
    "Priority",
    "is_due",
    "is_nth",
    "is_last",
    "check_number",
    "check_period",
    "CallbackHook",
    "IterationTimer",
]
__all__ += [
    "LRScheduler",
    "PeriodicCheckpointer",
    "EvalHook",
    "FinalEvalHook",
    "BestCheckpointer",
    "EarlyStopping",
]
__all__ += ["PeriodicWriter", "HOOK_REGISTRY"]

__getattr__, __dir__ = lending(__name__)
