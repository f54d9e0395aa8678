"""Every hook knows its place, whatever the order of HOOKS is."""

from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import VISUALIZER_REGISTRY
from trainkit.utils.plugins import NAMES


@VISUALIZER_REGISTRY.register()
def draws_nothing(inputs, outputs):
    return []


LISTED = [
    *({"NAME": name} for name in ("SyncBuffers", "UnusedParameters", "TorchMemoryStats", "MemorySnapshot")),
    {"NAME": "CheckFiniteLoss"},
    {"NAME": "Freeze", "NAMES": "layers.0*"},
    {"NAME": "VisualizationHook", "DRAW": "draws_nothing"},
    {"NAME": "TorchProfiler", "ENABLE_PREDICATE": [0, 1]},
    {"NAME": "ReduceOnPlateau", "VAL_METRIC": "classification/top1"},
    {"NAME": "ParamScheduler", "PARAM": "weight_decay", "SCHEDULES": [{"NAME": "Constant"}]},
    *({"NAME": name} for name in ("EmptyCache", "GarbageCollection", "EMAHook", "RuntimeInfo", "Throughput")),
    {"NAME": "BestCheckpointer", "VAL_METRIC": "loss", "MODE": "min", "FILE_PREFIX": "b"},
    {"NAME": "SamplerSeed"},
]
ORDER = """\
before_train: IterationTimer, Throughput, RuntimeInfo, SamplerSeed, EMAHook, LRScheduler, ParamScheduler,
 UnusedParameters, TorchMemoryStats, MemorySnapshot, Freeze, VisualizationHook, TorchProfiler,
 PeriodicCheckpointer, EvalHook, ReduceOnPlateau, BestCheckpointer, BestCheckpointer#2, EarlyStopping, FinalEvalHook,
 GarbageCollection, PublishWeights, PeriodicWriter
after_step: IterationTimer, Throughput, RuntimeInfo, EMAHook, LRScheduler, ParamScheduler, PreciseBN,
 TorchMemoryStats, TorchProfiler, SyncBuffers, PeriodicCheckpointer
-- save point
after_step: EvalHook, ReduceOnPlateau, BestCheckpointer, BestCheckpointer#2, EarlyStopping, FinalEvalHook,
 GarbageCollection, PeriodicWriter
after_train: PeriodicCheckpointer, EvalHook, BestCheckpointer, BestCheckpointer#2, FinalEvalHook, PublishWeights,
 IterationTimer, MemorySnapshot, Freeze, TorchProfiler, GarbageCollection, PeriodicWriter"""


def test_all_hooks_of_a_config_stand_in_their_fixed_order(tmp_path, monkeypatch):
    monkeypatch.setattr("trainkit.engine.defaults.RUN_HOOKS", {"SamplerSeed": NAMES["SamplerSeed"]})
    metric, keys = "classification/top1", ["CHECKPOINT.PUBLISH", "ema", "TEST.PRECISE_BN.ENABLED", True]
    keys += ["CHECKPOINT.BEST_METRIC", metric, "EARLY_STOPPING.METRIC", metric, "DATASETS.VAL", ("tiny_val",)]
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", LISTED, *keys))

    lines = [line.split(maxsplit=1) for line in trainer.describe_hooks().splitlines()]
    kept = [line for line in lines if line[0] in ("before_train", "after_step", "--", "after_train")]
    found = [f"{point} save point" if point == "--" else f"{point}: {names}" for point, names in kept]
    assert found == ORDER.replace(",\n", ",").splitlines()
