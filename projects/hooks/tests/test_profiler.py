import json

import torch
from torch.profiler import ProfilerActivity

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Steps
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import TorchProfiler


def multiply(iter):
    torch.ones(3, 3) @ torch.ones(3, 3)


def profiled(folder, iters, step=multiply, **kwargs):
    hook = TorchProfiler(lambda trainer: trainer.iter in iters, folder, activities=[ProfilerActivity.CPU], **kwargs)
    return Steps([hook], step=step)


def operators(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_each_picked_iteration_has_a_chrome_trace(tmp_path):
    profiled(tmp_path / "traces", {2, 4}, save_tensorboard=False).train(0, 6)
    paths = sorted((tmp_path / "traces").iterdir())
    assert [path.name for path in paths] == ["trace_iter0000002.json", "trace_iter0000004.json"]
    assert "aten::matmul" in operators(paths[0])


def test_from_a_config_traces_lie_in_a_folder_of_the_output_folder(tmp_path):
    entry = {"NAME": "TorchProfiler", "ENABLE_PREDICATE": [1, 2], "SAVE_TENSORBOARD": False}
    DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", [entry])).train(0, 3)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["trace_iter0000001.json"]
