"""What a replay is asked for beside its report, and what it leaves alone."""

import argparse
import json
import logging

import pytest
import torch
from trainkit.projects.replay import __main__ as tool
from trainkit.projects.replay import replay
from trainkit.projects.replay.tests.job import Job, Scans

from tests.engine.job import tiny_cfg
from trainkit.checkpoint.file import read_file
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer, default_setup
from trainkit.utils.logger import close_logger, setup_logger


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of 10 iterations, with checkpoints of iterations 4 and 9; ``script`` starts it again."""
    job = Job(tmp_path_factory.mktemp("run"))
    job()
    job.script = job.folder.parent / "script.py"
    job.script.write_text(f"from trainkit.projects.replay.tests.job import Job; Job({str(job.folder)!r})()")
    return job


def call(*words):
    return tool.main(tool.parse_args([*map(str, words)]))


def test_the_files_that_are_asked_for_hold_the_step(run, tmp_path, capsys):
    files = {name: tmp_path / name for name in ("batch", "state")}
    options = ["--save-batch", files["batch"], "--save-state", files["state"]]

    assert call(run.folder, "--iter", 7, "--once", "--json", *options, "--", run.script) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["iteration"] == 7
    batch = torch.load(files["batch"])
    assert [field["shape"] for field in found["batch"]] == [list(value.shape) for value in batch.values()]
    state = read_file(files["state"])
    assert state["trainer"]["iteration"] == 6


@pytest.mark.slow
def test_a_state_that_was_saved_is_a_checkpoint_from_which_the_run_goes_on(run, tmp_path):
    replay(run.folder, 7, run, verdict=False, save_state=str(tmp_path / "model_0000006.pth"))

    Job(tmp_path)(True)

    ends = [read_file(folder / "model_final.pth")["model"] for folder in (run.folder, tmp_path)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN"], "is a run: give --iter; got iter=None"),
        (["RUN/model_final.pth", "--iter", 3], "is a capsule of one step: leave out --iter and --prove; got iter=3"),
        (["RUN", "--iter", 3, "--range", "3:4", "--hook", f"{__file__}:A"], "and no --iter; got"),
        (["RUN", "--range", "3:4"], "--hook FILE:CLASS of a file"),
        (["RUN", "--range", "4:4", "--hook", f"{__file__}:A"], "with 0 <= A < B, "),
        (["RUN", "--range", "3:4", "--hook", f"{argparse.__file__}:A"], "argparse.py has no 'A'; name a class"),
        (["RUN", "--range", "3:4", "--hook", f"{__file__}:call", "--out", "RUN/x"], "in the folder of the run, which"),
        (["RUN", "--worst", 3], "--worst 3 needs --range A:B"),
        (["RUN", "--range", "3-4"], "argument --range: invalid iterations value: '3-4'"),
    ],
)
def test_wrong_arguments_end_with_one_line(run, capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        call(*(str(word).replace("RUN", str(run.folder)) for word in words))

    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------- what is left alone, and what is noticed


def test_the_loggers_of_the_caller_stay_as_they_are(run, tmp_path, capsys):
    logger = setup_logger(tmp_path / "mine.log")
    try:
        before = [*logger.handlers]

        replay(run.folder, 7, run)
        logger.info("still here")

        assert logger.handlers == before
        assert (tmp_path / "mine.log").read_text().count("\n") == 1
        assert "still here" in (tmp_path / "mine.log").read_text()
        assert logging.root.manager.disable == logging.NOTSET
    finally:
        close_logger()


class EarlyDraws(Job):
    """A script that draws between `default_setup` and its trainer."""

    def __call__(self):
        cfg = tiny_cfg(self.folder, "SEED", -1)
        default_setup(cfg, argparse.Namespace(resume=False, eval_only=False))
        torch.rand(3)
        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(False)
        return trainer.train()


def test_a_seed_that_was_drawn_is_set_before_what_a_script_draws_itself(tmp_path):
    EarlyDraws(tmp_path)()

    found = replay(tmp_path, 2, EarlyDraws(tmp_path), prove=True)

    assert found.start == "the beginning"
    assert found.proof.startswith("every byte equals model_0000004.pth")


class Changing(Scans):
    shift = 0.0

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"].nan_to_num() + self.shift}


DatasetCatalog.register("tiny_changing", Changing)


@pytest.mark.slow
def test_another_dataset_is_noticed(tmp_path, monkeypatch):
    job = Job(tmp_path, "DATASETS.TRAIN", ("tiny_changing",))
    job()
    monkeypatch.setattr(Changing, "shift", 1.0)

    found = replay(tmp_path, 7, job, prove=True)

    assert found.on_the_way.startswith("DIFFERENT: total_loss of iteration ")
    assert found.proof.startswith("DIFFERENT from model_final.pth in model/")
    assert found.verdict.startswith("different on this machine")
    assert not found.is_equal
