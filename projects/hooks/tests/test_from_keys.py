"""Hooks of a config: their order; a limit of the time, a profile, growing windows."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import VISUALIZER_REGISTRY
from trainkit.utils.plugins import find_plugins


def test_a_run_stops_at_its_limit_and_is_saved(tmp_path, monkeypatch, caplog):
    hours = iter(range(100))  # a step takes an hour
    clock = SimpleNamespace(monotonic=lambda: 3600.0 * next(hours))
    monkeypatch.setattr("trainkit.projects.hooks.time_limit.time", clock)
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "MAX_TIME", "3h", "SOLVER.CHECKPOINT_PERIOD", 0))
    caplog.set_level("INFO")
    trainer.train()
    assert trainer.status == "stopped"
    assert trainer.iter == 3
    [text] = [text for text in caplog.messages if text.startswith("Stopped after 3 of 10")]
    assert "MAX_TIME 3h" in text
    assert (tmp_path / "model_0000002.pth").exists()


@pytest.mark.parametrize(
    "entry", [{"NAME": "TorchProfiler", "SAVE_TENSORBOARD": False}, {"NAME": "AutogradProfiler"}]
)
def test_each_picked_iteration_has_a_chrome_trace_in_the_output_folder(tmp_path, entry):
    DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", [{**entry, "ENABLE_PREDICATE": [1, 3]}])).train(0, 4)
    paths = sorted((tmp_path / "profile").iterdir())
    assert [path.name for path in paths] == ["trace_iter0000001.json", "trace_iter0000002.json"]
    assert "aten::addmm" in {
        event.get("name") for event in json.loads(paths[0].read_text())["traceEvents"]
    }


def test_iterations_draw_more_and_more_of_one_stream(tmp_path):
    entry = {"NAME": "AccumulationSchedule", "FACTORS": [[3, 2], [6, 4]]}
    options = (
        "SOLVER.IMS_PER_BATCH",
        4,
        "TEST.EVAL_PERIOD",
        0,
        "DATASETS.TEST",
        (),
        "HOOKS",
        [entry],
    )
    trainer, drawn = DefaultTrainer(tiny_cfg(tmp_path, *options)), []
    trainer.model.register_forward_pre_hook(
        lambda model, args: drawn.append((trainer.iter, args[0]["x"]))
    )
    trainer.train()
    assert [iter for iter, _ in drawn] == [
        0,
        1,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
        *(i for i in (6, 7, 8, 9) for _ in range(4)),
    ]
    stream = iter(DefaultTrainer.build_train_loader(trainer.cfg))
    assert all(torch.equal(x, next(stream)["x"]) for _, x in drawn)


@VISUALIZER_REGISTRY.register()
def draws_nothing(inputs, outputs):
    return []


LISTED = [
    *(
        {"NAME": name}
        for name in ("SyncBuffers", "UnusedParameters", "TorchMemoryStats", "MemorySnapshot")
    ),
    {"NAME": "CheckFiniteLoss"},
    {"NAME": "Freeze", "NAMES": "layers.0*"},
    {"NAME": "VisualizationHook", "DRAW": "draws_nothing"},
    {"NAME": "TorchProfiler", "ENABLE_PREDICATE": [0, 1]},
    {"NAME": "ReduceOnPlateau", "VAL_METRIC": "classification/top1"},
    {"NAME": "ParamScheduler", "PARAM": "weight_decay", "SCHEDULES": [{"NAME": "Constant"}]},
    *(
        {"NAME": name}
        for name in ("EmptyCache", "GarbageCollection", "EMAHook", "RuntimeInfo", "Throughput")
    ),
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
after_train: PeriodicCheckpointer, EvalHook, ReduceOnPlateau, BestCheckpointer, BestCheckpointer#2, EarlyStopping,
 FinalEvalHook, PublishWeights, IterationTimer, Throughput, MemorySnapshot, Freeze, TorchProfiler,
 GarbageCollection, PeriodicWriter"""


def test_all_hooks_of_a_config_stand_in_their_fixed_order(tmp_path, monkeypatch):
    monkeypatch.setattr(find_plugins(), "run_hooks", ["SamplerSeed"])
    metric, keys = (
        "classification/top1",
        ["CHECKPOINT.PUBLISH", "ema", "TEST.PRECISE_BN.ENABLED", True],
    )
    keys += [
        "CHECKPOINT.BEST_METRIC",
        metric,
        "EARLY_STOPPING.METRIC",
        metric,
        "DATASETS.VAL",
        ("tiny_val",),
    ]
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", LISTED, *keys))
    lines = [line.split(maxsplit=1) for line in trainer.describe_hooks().splitlines()]
    kept = [
        line for line in lines if line[0] in ("before_train", "after_step", "--", "after_train")
    ]
    found = [
        f"{point} save point" if point == "--" else f"{point}: {names}" for point, names in kept
    ]
    assert found == ORDER.replace(",\n", ",").splitlines()
