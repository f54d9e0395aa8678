"""The hooks of trainkit, and the names needed to write one."""

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase, Priority
from trainkit.engine.hooks.callback import CallbackHook
from trainkit.engine.hooks.check_finite_loss import CheckFiniteLoss
from trainkit.engine.hooks.checkpoint import BestCheckpointer, PeriodicCheckpointer
from trainkit.engine.hooks.configured import ConfiguredHooks
from trainkit.engine.hooks.early_stopping import EarlyStopping
from trainkit.engine.hooks.ema import EMAHook
from trainkit.engine.hooks.evaluation import EvalHook, FinalEvalHook
from trainkit.engine.hooks.freeze import Freeze
from trainkit.engine.hooks.lr_scheduler import LRScheduler
from trainkit.engine.hooks.memory import EmptyCache, GarbageCollection, TorchMemoryStats
from trainkit.engine.hooks.memory_snapshot import MemorySnapshot
from trainkit.engine.hooks.param_scheduler import ParamScheduler
from trainkit.engine.hooks.precise_bn import PreciseBN
from trainkit.engine.hooks.profiler import AutogradProfiler, TorchProfiler
from trainkit.engine.hooks.publish import PublishWeights
from trainkit.engine.hooks.reduce_on_plateau import ReduceOnPlateau
from trainkit.engine.hooks.runtime_info import RuntimeInfo
from trainkit.engine.hooks.sampler_seed import SamplerSeed
from trainkit.engine.hooks.sync_buffers import SyncBuffers
from trainkit.engine.hooks.throughput import Throughput
from trainkit.engine.hooks.timer import IterationTimer
from trainkit.engine.hooks.unused_parameters import UnusedParameters
from trainkit.engine.hooks.visualization import VISUALIZER_REGISTRY, VisualizationHook
from trainkit.engine.hooks.writer import PeriodicWriter
from trainkit.utils.periods import check_period, is_due, is_due_epoch, is_last, is_nth

__all__ = [
    "HookBase",
    "Priority",
    "is_due",
    "is_due_epoch",
    "is_nth",
    "is_last",
    "check_period",
    "CallbackHook",
    "IterationTimer",
    "LRScheduler",
    "PeriodicCheckpointer",
    "EvalHook",
    "BestCheckpointer",
    "FinalEvalHook",
    "PeriodicWriter",
    "EMAHook",
    "Freeze",
    "EarlyStopping",
    "ReduceOnPlateau",
    "ParamScheduler",
    "PreciseBN",
    "SyncBuffers",
    "SamplerSeed",
    "PublishWeights",
    "CheckFiniteLoss",
    "UnusedParameters",
    "EmptyCache",
    "GarbageCollection",
    "RuntimeInfo",
    "Throughput",
    "TorchMemoryStats",
    "MemorySnapshot",
    "TorchProfiler",
    "AutogradProfiler",
    "VisualizationHook",
    "VISUALIZER_REGISTRY",
    "HOOK_REGISTRY",
    "ConfiguredHooks",
]
