"""Where did it first go wrong?"""

import pytest
import torch
from trainkit.projects.replay.search import first_bad, worst
from trainkit.projects.replay.tests.job import Job, PlantNan, digest_of_folder

from trainkit.checkpoint.file import read_file
from trainkit.config import ConfigError
from trainkit.engine import HookBase


class Grow(HookBase):
    """From iteration ``at`` on one weight is a hundred times as large as any; the loss notices it only later."""

    def __init__(self, at):
        self.at = at

    def before_step(self):
        if self.trainer.iter == self.at:
            with torch.no_grad():
                self.trainer.model.get_parameter("layers.4.bias").fill_(500.0)


OPTIONS = ("SOLVER.CHECKPOINT_PERIOD", 2, "DATASETS.TEST", (), "SOLVER.MAX_ITER", 12, "SOLVER.STEPS", ())


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("run"), *OPTIONS, make_hooks=lambda: [Grow(7)])
    job()
    return job


@pytest.mark.parametrize("quantity", ["weight", "layers.4", "trainer.model.layers[4].bias.abs().max()"])
def test_the_step_in_which_a_quantity_leaves_its_band_is_found_with_its_samples(grown, quantity):
    before = digest_of_folder(grown.folder)

    text = first_bad(grown.folder, 11, quantity, start=grown)

    assert text.startswith(f"{quantity} is first outside of its band in iteration 7: 5")
    assert "(from model_0000005.pth on)" in text
    assert text.count("of tiny_train") == 8
    assert digest_of_folder(grown.folder) == before


def test_a_loss_that_is_not_finite_is_found_in_the_step_that_fails(tmp_path):
    job = Job(tmp_path, *OPTIONS, make_hooks=lambda: [PlantNan("layers.0.weight", 9)])
    with pytest.raises(FloatingPointError):
        job()

    assert "outside of its band in iteration 9: nan" in first_bad(tmp_path, 9, start=job)
    assert first_bad(tmp_path, 8, start=job).startswith("loss stays within 10 times its running median at")


def test_the_steps_with_the_largest_losses_are_listed(grown):
    stored = read_file(grown.folder / "model_final.pth")["trainer"]["storage"]["histories"]["total_loss"]
    losses = dict(zip(stored["iterations"].tolist(), stored["values"].tolist(), strict=True))

    lines = worst(grown.folder, 2, 12, 2, grown).splitlines()

    largest = sorted(range(2, 12), key=losses.__getitem__)[:-3:-1]
    assert [line.partition(";")[0] for line in lines[:2]] == [f"iteration {i}: loss {losses[i]:.4g}" for i in largest]
    assert lines[0].count("of tiny_train") == 8
    assert lines[2].startswith("20 of 20 logged values equal those in model_final.pth")


def test_a_quantity_that_is_neither_a_module_nor_python_is_refused(grown):
    with pytest.raises(ConfigError, match="--quantity is 'a b'; accepted: loss, grad_norm, weight"):
        first_bad(grown.folder, 11, "a b", start=grown)
