"""A hook that did not exist then runs over past iterations, from each checkpoint on its own."""

import json

import pytest
from trainkit.projects.replay import replay_range
from trainkit.projects.replay.tests.job import Job, PlantNan, digest_of_folder

from trainkit.config import ConfigError
from trainkit.engine import HookBase


class Norm(HookBase):
    def after_step(self):
        weight = self.trainer.model.get_parameter("layers.0.weight")
        self.trainer.storage.put_scalar("norm", weight.norm().item())


class Disturb(HookBase):
    def after_backward(self):
        self.trainer.model.get_parameter("layers.0.weight").grad.mul_(2)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """With checkpoints of iterations 2, 5, 8 and 9; the hook has run in it from the beginning."""
    job = Job(tmp_path_factory.mktemp("run"), "SOLVER.CHECKPOINT_PERIOD", 3, make_hooks=lambda: [Norm()])
    job()
    return job


def test_a_range_gives_the_values_that_the_hook_had_in_the_run_and_changes_nothing(run, tmp_path):
    before = digest_of_folder(run.folder)

    whole = replay_range(run.folder, 0, 10, Norm, tmp_path / "whole", Job(run.folder))
    part = replay_range(run.folder, 4, 7, Norm, tmp_path / "part", Job(run.folder))

    assert digest_of_folder(run.folder) == before
    assert whole.startswith("30 of 30 logged values equal those in model_final.pth, iterations 0 to 9")
    assert part.startswith("9 of 9 logged values equal those in model_0000008.pth, iterations 4 to 6")
    assert rows(tmp_path / "part") == rows(tmp_path / "whole")[4:7]
    assert [*rows(tmp_path / "part")[0]] == ["iteration", "lr", "norm", "total_loss"]


def test_a_hook_that_changes_the_run_is_found_out(run, tmp_path):
    text = replay_range(run.folder, 3, 6, Disturb, tmp_path, Job(run.folder))

    assert text.startswith("DIFFERENT: total_loss of iteration 4 is ")


def test_a_range_beyond_the_end_of_the_run_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="--range ends with 11; the run ends with 10; make it smaller"):
        replay_range(run.folder, 9, 11, Norm, tmp_path, Job(run.folder))


def test_a_range_that_ends_in_a_failure_is_written_up_to_it(tmp_path):
    job = Job(tmp_path / "run", make_hooks=lambda: [PlantNan("layers.0.weight", 7)])
    with pytest.raises(FloatingPointError):
        job()

    text = replay_range(tmp_path / "run", 6, 9, Norm, tmp_path, job)

    assert text.startswith("FAILED in iteration 7: FloatingPointError: the loss is not finite in iteration 7")
    assert [row["iteration"] for row in rows(tmp_path) if "norm" in row] == [6]
