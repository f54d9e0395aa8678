"""What the benchmark measures and says; never how long something takes."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from trainkit.utils.events import EventStorage

ROOT = Path(__file__).resolve().parents[2]

PER_STEP = {"total_loss", "loss_mse", "loss_l1", "data_time", "rank_data_time", "lr", "time"}


@pytest.fixture(scope="module")
def tool():
    """The script, imported as it is where it is started: from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield importlib.import_module("benchmark")


@pytest.fixture
def job(tool):
    return tool.job


@pytest.fixture
def trainers(job, tmp_path):
    """Those of the step rows, with the folders that they write into."""
    with job.logging_to(tmp_path):
        yield {tmp_path / name: make(tmp_path / name) for name, make in job.TRAINERS.items()}


# ---------------------------------------------------------------------- the frame


def test_a_ratio_is_the_median_of_those_within_the_rounds(tool):
    measure = importlib.import_module("benchmarks.measure")
    found = {"new": [2.0, 30.0, 5.0], "bare": [1.0, 10.0, 4.0]}  # ratios 2, 3, 1.25; the ratio of the medians is 1.25

    row = measure.compare("row", found, "new", "bare", 2.0)
    speed = measure.compare("row", found, "new", "bare", 0.6, at_least=True)

    assert (row.value, row.sides, row.holds) == (2.0, {"new": 5.0, "bare": 4.0}, True)
    assert (speed.value, speed.holds) == (0.5, False)


@pytest.mark.parametrize(
    ("fields", "holds", "texts"),
    [
        ({"value": 1.1249, "goal": 1.1}, False, ["row", "1.125 x", "<= 1.1 x", "MISSED", ""]),
        ({"value": 3.1, "goal": 3, "at_least": True}, True, ["row", "3.1 x", ">= 3 x", "holds", ""]),
        ({"value": None, "goal": 3, "note": "no GPU"}, None, ["row", "not measured", "<= 3 x", "", "no GPU"]),
        ({"value": 2.0, "sides": {"a": 2e-6, "b": 0.5}}, None, ["row", "2 x", "", "", "a 2.0 us, b 500.0 ms"]),
    ],
)
def test_a_row_says_whether_its_goal_is_reached(tool, fields, holds, texts):
    row = importlib.import_module("benchmarks.measure").Row("row", **fields)

    assert (row.holds, row.as_texts()) == (holds, texts)


# ---------------------------------------------------------------------- the steps


def test_the_bare_loop_and_the_trainers_end_with_the_same_weights(job, trainers):
    for trainer in trainers.values():
        chunks, bare = job.Chunks(trainer), job.bare_loop()
        chunks(steps=20)
        chunks(steps=30)
        bare(trainer.iter - 1)
        parameters = list(zip(trainer.model.parameters(), bare.model.parameters(), strict=True))
        assert not any(torch.equal(ours, theirs) for ours, theirs in parameters)  # one step more makes a difference

        bare(1)

        assert all(torch.equal(ours, theirs) for ours, theirs in parameters)


# ---------------------------------------------------------------------- the rows

STEPS = {"SimpleTrainer": 1.1, "SimpleTrainer, console every 20 steps": 1.15}
STEPS |= {"SimpleTrainer, asynchronous writing": 1.15, "DefaultTrainer": 1.1}
ROWS = {
    "step": (
        lambda tool, scratch: tool.step.step(1, scratch=scratch, steps=2, peers={"other": lambda _: lambda steps: 1.0}),
        [(f"step: {name}", goal, "x", False) for name, goal in STEPS.items()]
        + [("step: SimpleTrainer, skip", 1.2, "x", False), ("step: other", None, "x", False)]
        + [(f"step: {name}, 100 tensors", 1.02, "x", False) for name in ("SimpleTrainer", "DefaultTrainer")],
    ),
    "history": (
        lambda tool, scratch: tool.history.history(1, scratch=scratch, steps=2, old_steps=1500, pairs=1),
        [(f"long history: {name}", 1.02, "x", False) for name in STEPS],
    ),
    "memory": (
        lambda tool, scratch: tool.history.memory(scratch=scratch, steps=12_000),
        [("storage of 20 scalars, 12,000 steps", 64, "MiB", False)],
    ),
    "ema": (
        lambda tool, scratch: tool.averaging.ema(1, scratch=scratch, updates=1, num_tensors=3),
        [("EMA of 3 tensors: EMAHook", 1.3, "x", False), ("EMA of 3 tensors: torch's AveragedModel", None, "x", False)],
    ),
    "save": (
        lambda tool, scratch: tool.checkpoint.save(1, scratch=scratch, num_layers=1),
        [
            ("stall of an asynchronous save", 0.2, "x", False),
            ("synchronous save", 1.2, "x", False),
            ("save of the tiny job", 1.2, "x", False),
        ],
    ),
    "import": (
        lambda tool, scratch: tool.imports.imports(1, scratch=scratch),
        [
            ("import SimpleTrainer", 0.1, "s", False),
            ("tensorboard, matplotlib, omegaconf in its sys.modules", 0, "modules", False),
        ],
    ),
    "ranks": (
        lambda tool, scratch: tool.ranks.ranks(1, scratch=scratch, steps=2, width=4),
        [(f"metric exchange on two ranks{of}", 1.03, "x", False) for of in ("", " of a larger model")],
    ),
    "logical": (
        lambda tool, scratch: tool.ranks.logical(1, scratch=scratch, steps=2, width=4, counts=(2,)),
        [
            (f"logical ranks on 2 processes, {of}", 1.25, "x", False)
            for of in ("a small model", "two million parameters")
        ],
    ),
    "loader": (
        lambda tool, scratch: tool.loader.loader(1, scratch=scratch, batches=2, workers=[0]),
        [
            ("loader, trivial samples, 0 workers: per sample over DataLoader", 12.0, "us", False),
            ("loader, crops, 0 workers", 1.3, "x", False),
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_each_row_is_measured_and_has_its_goal(tool, tmp_path, forked_ranks, name):
    measure, expected = ROWS[name]
    rows = measure(tool, tmp_path)

    assert [(row.name, row.goal, row.unit, row.at_least) for row in rows] == expected
    assert all(row.value is not None for row in rows)
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
def test_what_runs_on_a_gpu_runs_on_a_cpu_as_well(tool, job, tmp_path):
    calls = []
    with job.logging_to(tmp_path):
        between = tool.cuda.Between(1, 20, lambda: calls.append("begin"), lambda: calls.append("end"))
        trainer = tool.cuda.everything_on(tmp_path / "everything", "cpu", [between])
        trainer.train()
        row = tool.cuda.throughput(tmp_path / "throughput", 1, steps=1, channels=8, pictures=1, device="cpu")

    assert (calls, trainer.iter, trainer.status) == (["begin", "end"], 21, "stopped")
    assert {"grad_norm", "[metric]grad_scaler", "skipped_updates", *PER_STEP} - {"loss_mse", "loss_l1"} <= set(
        trainer.storage.histories()
    )
    assert "IterationTimer, EMAHook, LRScheduler, PeriodicCheckpointer, EvalHook, " in trainer.describe_hooks()
    assert (row.name, row.goal, row.at_least) == ("GPU throughput over a bare loop", 0.99, True)


# ---------------------------------------------------------------------- the command


def test_the_record_holds_machine_bare_loop_and_rows(tool, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files = {name: tmp_path / name for name in ("json", "markdown")}
    tool.main(tool.parse_args(["--rows", "cuda", *(f"--{name}={path}" for name, path in files.items())]))

    record = json.loads(files["json"].read_text())
    assert record.keys() == {"date", "command", "machine", "bare_loop", "rows"}
    assert record["machine"].keys() == {"CPU", "GPU", "system", "versions", "threads"}
    assert record["rows"][0] | {"goal": 0, "holds": None, "note": "no GPU", "value": None} == record["rows"][0]
    printed = capsys.readouterr().out
    for text in (printed, files["markdown"].read_text()):
        assert "GPU throughput over a bare loop" in text
        assert f"torch {torch.__version__}" in text
    for line in ("losses = model(next(batches))", "optimizer.zero_grad()", "scheduler.step()"):
        assert f"            {line}\n" in printed
        assert f"            {line}\n" in record["bare_loop"]


def test_all_rows_are_measured_with_their_own_rounds_by_default(tool, monkeypatch, tmp_path):
    asked = {}
    for name in tool.ROWS:
        monkeypatch.setitem(tool.ROWS, name, lambda name=name, **options: asked.update({name: options}) or [])
    list(tool.measure(tool.parse_args(["--scratch", str(tmp_path)])))

    rows = "step history memory ema save import resume ranks logical loader cuda graph"
    assert list(asked) == rows.split()
    assert {options.pop("scratch").parent for options in asked.values()} == {tmp_path}
    given = {name: options for name, options in asked.items() if options}
    assert given == {"step": {"peers": {}}, "memory": {"steps": 1_000_000}}

    list(tool.measure(tool.parse_args(["--rows", "memory,ema", "--rounds", "3", "--full"])))

    assert [asked[name].keys() - {"scratch"} for name in ("memory", "ema")] == [{"rounds"}, {"rounds"}]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rows", "step,speed"], "argument --rows: there is no row 'speed'; there are step, history, "),
        (["--against", "fast"], "argument --against: there is no peer 'fast'; there are accelerate, ignite, "),
        (["--rounds", "0"], "argument --rounds: need a whole number >= 1, got '0'"),
        (["--json", "missing/x.json"], "argument --json: cannot write 'missing/x.json'"),
        (["--scratch", "missing"], "argument --scratch: need a folder that is there and writable, got 'missing'"),
        (["--rows", "ema", "--against", "ignite"], "--against adds to the step rows; add step to --rows"),
    ],
)
def test_wrong_arguments_end_with_one_message(tool, capsys, args, message):
    with pytest.raises(SystemExit) as caught:
        tool.parse_args(args)

    usage, error = capsys.readouterr().err.splitlines()
    assert (caught.value.code, usage) == (2, "usage: benchmark.py [options]")
    assert error.startswith(f"benchmark.py: error: {message}")
