"""What the benchmark measures and says; never how long something takes."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from trainkit.utils.events import EventStorage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    """The script, imported as it is where it is started: from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield importlib.import_module("benchmark")


def test_a_ratio_is_the_median_of_those_within_the_rounds_and_a_row_says_whether_its_goal_is_reached(
    tool,
):
    measure = importlib.import_module("benchmarks.measure")
    # ratios 2, 3, 1.25; the ratio of the medians is 1.25
    found = {
        "new": [2.0, 30.0, 5.0],
        "bare": [1.0, 10.0, 4.0],
    }
    row = measure.compare("row", found, "new", "bare", 2.0)
    speed = measure.compare("row", found, "new", "bare", 0.6, at_least=True)
    assert (row.value, row.sides, row.holds) == (2.0, {"new": 5.0, "bare": 4.0}, True)
    assert (speed.value, speed.holds) == (0.5, False)
    texts = [
        measure.Row("row", 1.1249, 1.1).as_texts(),
        measure.Row("row", None, 3, note="no GPU").as_texts(),
    ]
    assert texts == [
        ["row", "1.125 x", "<= 1.1 x", "MISSED", ""],
        ["row", "not measured", "<= 3 x", "", "no GPU"],
    ]


def test_the_bare_loop_and_the_trainers_end_with_the_same_weights(tool, tmp_path):
    job = tool.job
    for name, make in job.TRAINERS.items():
        with job.logging_to(tmp_path):
            trainer = make(tmp_path / name)
        chunks, bare = job.Chunks(trainer), job.bare_loop()
        chunks(steps=20)
        chunks(steps=30)
        bare(trainer.iter - 1)
        parameters = list(zip(trainer.model.parameters(), bare.model.parameters(), strict=True))
        # one step more makes a difference
        assert not any(torch.equal(ours, theirs) for ours, theirs in parameters)

        bare(1)

        assert all(torch.equal(ours, theirs) for ours, theirs in parameters)


# row -> arguments of a short measurement, and how many numbers it gives
ROWS = {
    "step": ({"rounds": 1, "steps": 2, "peers": {"other": lambda _: lambda steps: 1.0}}, 8),
    "history": ({"rounds": 1, "steps": 2, "old_steps": 1500, "pairs": 1}, 4),
    "memory": ({"steps": 12_000}, 1),
    "ema": ({"rounds": 1, "updates": 1, "num_tensors": 3}, 2),
    "save": ({"rounds": 1, "num_layers": 1}, 3),
    "import": ({"rounds": 1}, 2),
    "ranks": ({"rounds": 1, "steps": 2, "width": 4}, 2),
    "logical": ({"rounds": 1, "steps": 2, "width": 4, "counts": (2,)}, 2),
    "loader": ({"rounds": 1, "batches": 2, "workers": [0]}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_each_row_is_measured_and_has_its_goal(tool, tmp_path, forked_ranks, name):
    options, number = ROWS[name]
    rows = tool.ROWS[name](scratch=tmp_path, **options)
    assert len({row.name for row in rows}) == number
    assert all(row.value is not None for row in rows)
    assert sum(row.goal is None for row in rows) == (name in ("step", "ema"))  # of another library
    assert name != "save" or list(tmp_path.rglob("*.pth")) == []


@pytest.mark.slow
def test_the_resumed_runs_stand_where_they_say(tool, tmp_path):
    rows = tool.resume.resume(1, scratch=tmp_path, late=1_000_000, workers=[0])
    assert (rows[0].name, rows[0].goal) == ("resume, 0 loader workers", 1.1)
    assert rows[0].sides.keys() == {"at 1,000,000", "at 10"}
    for iterations, held in ((1_000_000, 10_000), (10, 12)):  # and one more in each of two rounds
        (path,) = (tmp_path / f"{iterations}_0").glob("*.pth")
        state = torch.load(path, weights_only=True)["trainer"]
        storage = EventStorage()
        storage.load_state_dict(state["storage"])
        assert state["iteration"] == iterations + 1
        assert state["data"]["position"] == (iterations + 2) * 16
        assert len(storage.history("total_loss").values()) == held


@pytest.mark.slow
def test_what_runs_on_a_gpu_runs_on_a_cpu_as_well(tool, tmp_path):
    calls = []
    with tool.job.logging_to(tmp_path):
        between = tool.cuda.Between(
            1, 20, lambda: calls.append("begin"), lambda: calls.append("end")
        )
        trainer = tool.cuda.everything_on(tmp_path / "everything", "cpu", [between])
        trainer.train()
        row = tool.cuda.throughput(
            tmp_path / "throughput", 1, steps=1, channels=8, pictures=1, device="cpu"
        )

    assert (calls, trainer.iter, trainer.status) == (["begin", "end"], 21, "stopped")
    assert {"grad_norm", "[metric]grad_scaler", "skipped_updates", "total_loss", "lr"} <= {
        *trainer.storage.histories()
    }
    assert (
        "IterationTimer, EMAHook, LRScheduler, PeriodicCheckpointer, EvalHook, "
        in trainer.describe_hooks()
    )
    assert (row.name, row.goal, row.at_least) == ("GPU throughput over a bare loop", 0.99, True)


def test_the_record_holds_machine_bare_loop_and_rows_each_with_its_own_rounds(
    tool, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files = {name: tmp_path / name for name in ("json", "markdown")}
    tool.main(
        tool.parse_args(["--rows", "cuda", *(f"--{name}={path}" for name, path in files.items())])
    )

    record = json.loads(files["json"].read_text())
    assert record.keys() == {"date", "command", "machine", "bare_loop", "rows"}
    assert (
        record["rows"][0] | {"goal": 0, "holds": None, "note": "no GPU", "value": None}
        == record["rows"][0]
    )
    printed = capsys.readouterr().out
    for text in ("GPU throughput over a bare loop", f"torch {torch.__version__}"):
        assert text in printed
        assert text in files["markdown"].read_text()
    assert record["bare_loop"] in printed

    asked = {}
    for name in tool.ROWS:
        monkeypatch.setitem(
            tool.ROWS,
            name,
            lambda scratch, name=name, **options: asked.update({name: options}) or [],
        )
    list(tool.measure(tool.parse_args([])))
    assert asked == {
        **{name: {} for name in tool.ROWS},
        "step": {"peers": {}},
        "memory": {"steps": 1_000_000},
    }
    list(tool.measure(tool.parse_args(["--rows", "memory,ema", "--rounds", "3", "--full"])))
    assert asked["memory"] == asked["ema"] == {"rounds": 3}
