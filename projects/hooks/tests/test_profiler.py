import json

from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer


def test_each_picked_iteration_has_a_chrome_trace_in_the_output_folder(tmp_path):
    entry = {"NAME": "TorchProfiler", "ENABLE_PREDICATE": [1, 3], "SAVE_TENSORBOARD": False}
    DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", [entry])).train(0, 4)
    paths = sorted((tmp_path / "profile").iterdir())
    assert [path.name for path in paths] == ["trace_iter0000001.json", "trace_iter0000002.json"]
    assert "aten::addmm" in {event.get("name") for event in json.loads(paths[0].read_text())["traceEvents"]}
