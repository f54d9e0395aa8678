"""Questions over past iterations: where did it first go wrong, and what would a new hook have seen?"""

import json

import pytest
from trainkit.projects.replay import replay_range
from trainkit.projects.replay.search import first_bad, worst
from trainkit.projects.replay.tests.job import Job, digest_of_folder, plant, plant_nan

from trainkit.checkpoint.file import read_file
from trainkit.config import ConfigError
from trainkit.engine import HookBase

pytestmark = pytest.mark.slow  # each test trains and replays in several ways


def grow():
    """From iteration 7 on one weight is a hundred times as large as any; the loss notices it only later."""
    return plant(500.0, "layers.4.bias", 7)


class Norm(HookBase):
    def after_step(self):
        weight = self.trainer.model.get_parameter("layers.0.weight")
        self.trainer.storage.put_scalar("norm", weight.norm().item())


class Disturb(HookBase):
    def after_backward(self):
        self.trainer.model.get_parameter("layers.0.weight").grad.mul_(2)


OPTIONS = (
    "SOLVER.CHECKPOINT_PERIOD",
    2,
    "DATASETS.TEST",
    (),
    "SOLVER.MAX_ITER",
    12,
    "SOLVER.STEPS",
    (),
)


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """With checkpoints of each second iteration; the hook `Norm` has run in it from the beginning."""
    job = Job(tmp_path_factory.mktemp("run"), *OPTIONS, make_hooks=lambda: [grow(), Norm()])
    job()
    return job


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def test_the_step_in_which_a_quantity_leaves_its_band_is_found_with_its_samples(grown):
    before = digest_of_folder(grown.folder)

    for quantity in ("weight", "layers.4", "trainer.model.layers[4].bias.abs().max()"):
        text = first_bad(grown.folder, 11, quantity, start=grown)

        assert text.startswith(f"{quantity} is first outside of its band in iteration 7: 5")
        assert "(from model_0000005.pth on)" in text
        assert text.count("sample ") == 8
    assert digest_of_folder(grown.folder) == before
    with pytest.raises(
        ConfigError, match="--quantity is 'layer4' .*; accepted: loss, grad_norm, weight"
    ):
        first_bad(grown.folder, 11, "layer4", start=grown)


def test_the_steps_with_the_largest_losses_are_listed(grown):
    stored = read_file(grown.folder / "model_final.pth")["trainer"]["storage"]["histories"][
        "total_loss"
    ]
    losses = dict(zip(stored["iterations"].tolist(), stored["values"].tolist(), strict=True))
    lines = worst(grown.folder, 2, 12, 2, grown).splitlines()
    largest = sorted(range(2, 12), key=losses.__getitem__)[:-3:-1]
    assert [line.partition(";")[0] for line in lines[:2]] == [
        f"iteration {i}: loss {losses[i]:.4g}" for i in largest
    ]
    assert lines[0].count("sample ") == 8
    assert lines[2].startswith("30 of 30 logged values equal those in model_final.pth")


def test_a_range_gives_the_values_that_the_hook_had_in_the_run_and_changes_nothing(grown, tmp_path):
    before, plain = (
        digest_of_folder(grown.folder),
        Job(grown.folder, *OPTIONS, make_hooks=lambda: [grow()]),
    )
    whole = replay_range(grown.folder, 0, 12, Norm, tmp_path / "whole", plain)
    part = replay_range(grown.folder, 4, 7, Norm, tmp_path / "part", plain)
    disturbed = replay_range(grown.folder, 4, 7, Disturb, tmp_path / "disturbed", plain)
    assert digest_of_folder(grown.folder) == before
    assert whole.startswith(
        "36 of 36 logged values equal those in model_final.pth, iterations 0 to 11"
    )
    assert part.startswith(
        "9 of 9 logged values equal those in model_0000007.pth, iterations 4 to 6"
    )
    assert rows(tmp_path / "part") == rows(tmp_path / "whole")[4:7]
    assert [*rows(tmp_path / "part")[0]] == ["iteration", "lr", "norm", "total_loss"]
    assert disturbed.startswith("DIFFERENT: total_loss of iteration 5 is ")


def test_a_failure_is_found_in_its_step_and_a_range_that_ends_in_it_is_written_up_to_it(tmp_path):
    job = Job(tmp_path / "run", *OPTIONS, make_hooks=lambda: [plant_nan("layers.0.weight", 9)])
    with pytest.raises(FloatingPointError):
        job()

    assert "outside of its band in iteration 9: nan" in first_bad(job.folder, None, start=job)
    assert first_bad(job.folder, 8, start=job).startswith(
        "loss stays within 10 times its running median at"
    )
    text = replay_range(job.folder, 8, 11, Norm, tmp_path, job)
    assert text.startswith(
        "FAILED in iteration 9: FloatingPointError: the loss is not finite in iteration 9"
    )
    assert [row["iteration"] for row in rows(tmp_path) if "norm" in row] == [8]
