"""A verdict speaks of the failure itself: each fault of the table in docs/replay.md is planted and replayed."""

import re
import sys

import pytest
from trainkit.projects.replay import replay, replay_range
from trainkit.projects.replay.failure import Failure, compare_endings
from trainkit.projects.replay.search import first_bad, is_equal, worst
from trainkit.projects.replay.tests.job import At, Job, Scans

from tests.docs.pages import ROOT, page
from tests.engine.job import TinyClassifier
from tests.forked import run_forked, script
from trainkit.checkpoint.file import read_file, write_file
from trainkit.data import DatasetCatalog
from trainkit.engine.hooks import CallbackHook
from trainkit.modeling import MODEL_REGISTRY

OPTIONS = ("DATASETS.TEST", (), "SOLVER.MAX_ITER", 20, "SOLVER.STEPS", ())
NOT_BACK = "the failure has not come back"

# Each fault but the bad sample fails in iteration 12, two iterations after a checkpoint, or changes numbers.
SCRIPT = """
import os, sys
from pathlib import Path
import torch
from tests.engine.job import TinyClassifier
from trainkit.data import DatasetCatalog
from trainkit.modeling import MODEL_REGISTRY
from trainkit.projects.replay.tests.job import Scans, train

NAN = float("nan")


def tick():
    # chance and a clock: what no process has, and what never comes again
    file = Path("ticks")
    number = int(file.read_text()) if file.exists() else 0
    file.write_text(str(number + 1))
    return number


class Faulty(TinyClassifier):
    calls = 0

    def forward(self, batch):
        self.calls += 1
        return {"loss_cls": super().forward(batch)["loss_cls"] * self.factor()}


@MODEL_REGISTRY.register()
class Good(Faulty):
    def factor(self):
        return 1.0


@MODEL_REGISTRY.register()
class CountsAndFails(Faulty):
    def factor(self):
        return NAN if self.calls == 13 else 1.0


@MODEL_REGISTRY.register()
class Counts(Faulty):
    def factor(self):
        return 1 + self.calls / 1000


@MODEL_REGISTRY.register()
class FailsByChance(Faulty):
    def factor(self):
        return NAN if tick() == 12 else 1.0


@MODEL_REGISTRY.register()
class DisturbedOnce(Faulty):
    # 20 ticks are of the run, the 2 next ones of the way of the replay
    def factor(self):
        return 2.0 if tick() == 21 else 1.0


@MODEL_REGISTRY.register()
class Random(Faulty):
    def factor(self):
        return 1 + int.from_bytes(os.urandom(4), "little") / 2**32


@MODEL_REGISTRY.register()
class OrderOfASet(Faulty):
    def factor(self):
        return float(next(iter({*map(str, range(1, 1000))})))


@MODEL_REGISTRY.register()
class Killed(Faulty):
    def factor(self):
        if tick() == 12:
            os._exit(1)
        return 1.0


class Samples(Scans):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": self.change(x, index), "label": index % 2}

    def change(self, x, index):
        return x


class BadSample(Samples):
    def change(self, x, index):
        return x * NAN if index == 17 else x


class CountsReads(Samples):
    def change(self, x, index):
        return x * NAN if self.reads == 100 else x


class BadWorker(Samples):
    # of two workers each has read 6 batches of 8 before iteration 12
    def change(self, x, index):
        return x * NAN if self.reads > 48 else x


class Clock(Samples):
    def change(self, x, index):
        return x / (100 - tick())


class NeedsFile(Samples):
    def change(self, x, index):
        open("needed").close()
        return x


for kind in (Samples, BadSample, CountsReads, BadWorker, Clock, NeedsFile):
    DatasetCatalog.register(kind.__name__, kind)

model, data, workers, *words = sys.argv[1:]
options = ["MODEL.NAME", model, "DATASETS.TRAIN", (data,), "DATALOADER.NUM_WORKERS", int(workers)]
options += ["DATASETS.TEST", (), "SOLVER.MAX_ITER", 20, "SOLVER.STEPS", (), "INPUT.TRAIN_TRANSFORM", ""]
train("run", *words, options=options)
"""


def change_stored_value(folder):
    path = folder / "run/model_0000014.pth"
    state = read_file(path)
    state["trainer"]["storage"]["histories"]["total_loss"]["values"][12] += 1e-6
    write_file(state, path)


# row of the page: model, data set, number of workers
PLANTS = {
    "a sample with a NaN": ("Good", "BadSample", 0),
    "a counter in the model": ("CountsAndFails", "Samples", 0),
    "a counter in the data set": ("Good", "CountsReads", 0),
    "a loader worker that goes bad": ("Good", "BadWorker", 2),
    "chance": ("FailsByChance", "Samples", 0),
    "an augmentation from the clock": ("Good", "Clock", 0),
    "nothing": ("Good", "Samples", 0),
    "the process was killed in the step": ("Killed", "Samples", 0),
    "a counter that changes the loss": ("Counts", "Samples", 0),
    "`os.urandom` in each step": ("Random", "Samples", 0),
    "`os.urandom` in one step on the way": ("DisturbedOnce", "Samples", 0),
    "the order of a set": ("OrderOfASet", "Samples", 0),
    "another machine": ("Good", "Samples", 0),
    "a file that is gone": ("Good", "NeedsFile", 0),
}
AFTER_THE_RUN = {
    "another machine": change_stored_value,
    "a file that is gone": lambda folder: (folder / "needed").unlink(),
}
FIRST_STEP = {"a file that is gone"}  # it cannot pass the way


def rows_of_the_page():
    """what is wrong -> same process, new process, verdict from the checkpoint, verdict from the capsule"""
    lines = page("docs/replay.md").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| what is wrong |")) + 2
    rows = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        first, *others = [cell.strip(" *") for cell in line.strip("|").split("|")]
        rows[first] = others
    return rows


def kind_of(report):
    return re.split(r" \(|: |, which", re.search(r"^verdict: (.*)$", report, re.MULTILINE)[1])[0]


def print_replay(capsule, command):
    """What the tool does, but without a new process."""
    found = replay(capsule, start=script(*command))
    print(found)
    sys.exit(not found.is_equal)


def executions(report):
    found = []
    for process in ("this", "a new"):
        found.append("differs" if f"in {process} process it differs" in report else "equal")
    return found


def test_the_page_has_a_row_for_each_planted_fault():
    assert rows_of_the_page().keys() == PLANTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTS)
def test_the_table_of_verdicts_on_the_page_is_what_each_planted_fault_gives(fault, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "needed").touch()
    command = ["train.py", *map(str, PLANTS[fault])]
    failed = run_forked(script(tmp_path / "train.py", *command[1:]), tmp_path)
    capsule = tmp_path / "run/capsule.rank0.pt"
    AFTER_THE_RUN.get(fault, lambda folder: None)(tmp_path)
    tool = ROOT / "tools/replay.py"
    iter = 10 if fault in FIRST_STEP else 12
    if fault == "a sample with a NaN":
        iter = read_file(capsule)["capsule"]["iteration"]

    found = run_forked(script(tool, "run", "--iter", iter, "--", *command), tmp_path)
    row = [*executions(found.stdout), kind_of(found.stdout)]
    codes = [(kind_of(found.stdout), found.returncode)]
    if capsule.exists():
        assert read_file(capsule)["capsule"]["iteration"] == iter, failed.stderr
        found = run_forked(lambda: print_replay(capsule, command), tmp_path)
        row.append(kind_of(found.stdout))
        codes.append((row[-1], found.returncode))
    else:
        row.append("")

    assert row == rows_of_the_page()[fault]
    assert [code for _, code in codes] == [
        int(not kind.startswith("reproducible")) for kind, _ in codes
    ]


# ------------------------------------------------------------------ in this process, without a new one


@MODEL_REGISTRY.register()
class FailsInItsThirteenthCall(TinyClassifier):
    """Its counter is no buffer, so a replay from iteration 10 on counts from 0."""

    calls = 0

    def forward(self, batch):
        losses = super().forward(batch)
        self.calls += 1
        return {"loss_cls": losses["loss_cls"] * (float("nan") if self.calls == 13 else 1)}


class RaisesInItsHundredthRead(Scans):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        if self.reads == 100:
            raise OSError("the disk has gone")
        return {**super().__getitem__(3), "label": index % 2}


DatasetCatalog.register("tiny_raises", RaisesInItsHundredthRead)


def counting(folder, *options):
    """A run that has failed in iteration 12, with checkpoints of iterations 4 and 9."""
    job = Job(folder, *OPTIONS, "MODEL.NAME", "FailsInItsThirteenthCall", *options)
    with pytest.raises(FloatingPointError):
        job()
    return job


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    return counting(tmp_path_factory.mktemp("run"))


LOST = (
    "DIFFERENT: it has not come back: in the run iteration 12 has ended with FloatingPointError: "
    "the loss is not finite in iteration 12: {'total_loss': nan}; here it has not failed"
)


def test_a_failure_that_has_not_come_back_is_not_reproducible(counted):
    for run, iter in ((counted.folder, 12), (counted.folder / "capsule.rank0.pt", None)):
        found = replay(run, iter, counted, bisect=True)

        assert found.failure.startswith(LOST)
        assert found.verdict.startswith(f"{NOT_BACK} (a counter in the model or the data set ")
        assert "reproducible" not in found.verdict
        assert found.samples_at_fault.startswith("the loss is finite; ")
        assert not found.is_equal
        assert not replay(run, iter, counted, verdict=False).is_equal


@pytest.mark.slow
def test_every_question_about_past_iterations_says_that_the_failure_has_not_come_back(
    counted, tmp_path
):
    for text in (
        first_bad(counted.folder, None, start=counted),
        first_bad(counted.folder, 12, "weight", start=counted),
        worst(counted.folder, 8, 13, 2, counted),
        replay_range(counted.folder, 11, 13, CallbackHook, tmp_path, counted),
    ):
        assert LOST in text
        assert not is_equal(text)
    before = worst(counted.folder, 8, 12, 2, counted)
    assert is_equal(before)
    assert before.endswith("logged values equal those in capsule.rank0.pt, iterations 8 to 11")


def test_a_step_after_a_failure_that_has_not_come_back_is_not_that_of_the_run(counted):
    found = replay(counted.folder, 13, counted)
    assert found.failure.startswith(LOST)
    assert found.verdict.startswith(NOT_BACK)


@pytest.mark.slow
def test_a_failure_that_the_run_has_passed_when_it_was_resumed_counts_in_its_own_step(tmp_path):
    job = counting(tmp_path)
    job("--resume")
    step, later = (replay(tmp_path, iter, job) for iter in (12, 13))
    assert step.failure.startswith(LOST)
    assert step.verdict.startswith(NOT_BACK)
    assert later.failure == ""
    assert later.verdict.startswith("reproducible: ")


def test_an_error_of_the_data_set_that_has_not_come_back_is_named(tmp_path):
    job = Job(tmp_path, *OPTIONS, "DATASETS.TRAIN", ("tiny_raises",))
    with pytest.raises(RuntimeError):
        job()
    found = replay(tmp_path, 12, job)
    assert "ended with RuntimeError: OSError while loading scan_" in found.failure
    assert found.verdict.startswith(NOT_BACK)


def test_a_failure_is_compared_also_if_the_checkpoints_have_their_own_folder(tmp_path):
    job = counting(tmp_path / "run", "CHECKPOINT.DIR", str(tmp_path / "weights"))
    found = replay(tmp_path / "weights", 12, job)
    assert found.failure.startswith(LOST)
    assert (tmp_path / "run/capsule.rank0.pt").exists()


@pytest.mark.slow
def test_a_failure_that_only_the_replay_has_is_not_reproducible(tmp_path):
    Job(tmp_path)()
    job = Job(tmp_path, make_hooks=lambda: [At(6, KeyError("new"), "after_backward")])
    found = replay(tmp_path, 6, job)
    text = replay_range(tmp_path, 5, 8, CallbackHook, tmp_path / "out", job)
    lost = "DIFFERENT: the run has not failed in iteration 6, and the replay has: KeyError: 'new'"
    assert found.failure == lost
    assert found.verdict.startswith("the failure is not that of the run, which has done this step")
    assert not found.is_equal
    assert text.startswith(lost)
    assert first_bad(tmp_path, None, start=job).splitlines()[-1] == lost


def test_an_error_with_another_text_is_another_failure_and_an_address_is_no_difference():
    nan, inf = float("nan"), float("inf")
    run = Failure(12, "KeyError: '<Box at 0x7f01>'", {"loss": 0.25})
    for here, text, comparison in [
        (
            Failure(12, "KeyError: '<Box at 0x9e02>'", {"loss": 0.25}),
            "it has come back; 1 of 1 losses equal those of the run",
            "has come back",
        ),
        (
            Failure(12, "KeyError: '<Box at 0x7f01>'", {"loss": 0.5}),
            "DIFFERENT: it has come back, but loss is 0.5 here and 0.25 in the run",
            "has come back",
        ),
        (
            Failure(12, "KeyError: '<Box at 0x7f01>'", {"loss": nan}),
            "here with the same error, but loss is nan here and 0.25 in the run",
            "has not come back",
        ),
        (Failure(12, "KeyError: '<Bag at 0x7f01>'", {}), "here with KeyError", "has not come back"),
        (Failure(12, "OSError: '<Box at 0x7f01>'", {}), "here with OSError", "has not come back"),
        (Failure(11, run.error, {}), "here iteration 11 has ended with", "has not come back"),
        (None, "; here it has not failed", "has not come back"),
    ]:
        found, word = compare_endings(run, here, done_by_run=11)
        assert text in found
        assert word == comparison
    for error, same in [
        ("OutOfMemoryError: tried 2 MiB, 3 MiB free", "OutOfMemoryError: tried 2 MiB, 1 MiB free"),
        ("RuntimeError: worker process 0 has ended", "RuntimeError: worker process 1 has ended"),
        ("RuntimeError: worker (pid(s) 12, 13) ended", "RuntimeError: worker (pid(s) 77) ended"),
        (
            "FloatingPointError: not finite in iteration 12: {} (on rank 1)",
            "FloatingPointError: not finite in iteration 13: {}",
        ),
    ]:
        failures = (Failure(12, text, {"loss": inf}) for text in (error, same))
        assert compare_endings(*failures, 11)[1] == "has come back"
    assert compare_endings(None, run, done_by_run=11) == ("", "not known")
    assert compare_endings(None, None, done_by_run=20) == ("", "not known")
    assert compare_endings(None, run, done_by_run=12)[1] == "only here"
