"""The hooks that come with trainkit, and what a hook of one's own is made of."""

from trainkit.engine.hooks.callback import CallbackHook
from trainkit.engine.hooks.checkpoint import BestCheckpointer, PeriodicCheckpointer
from trainkit.engine.hooks.early_stopping import EarlyStopping
from trainkit.engine.hooks.evaluation import EvalHook
from trainkit.engine.hooks.lr_scheduler import LRScheduler
from trainkit.engine.hooks.memory import TorchMemoryStats
from trainkit.engine.hooks.precise_bn import PreciseBN
from trainkit.engine.hooks.profiler import TorchProfiler
from trainkit.engine.hooks.timer import IterationTimer
from trainkit.engine.hooks.writer import PeriodicWriter
from trainkit.engine.train_loop import HookBase, Priority, is_due

__all__ = [
    "BestCheckpointer",
    "CallbackHook",
    "EarlyStopping",
    "EvalHook",
    "HookBase",
    "IterationTimer",
    "LRScheduler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "PreciseBN",
    "Priority",
    "TorchMemoryStats",
    "TorchProfiler",
    "is_due",
]
