"""A `DefaultTrainer` with a ``run_step`` of its own: what it does not do is said once."""

import pytest
import torch

from tests.engine.job import tiny_cfg
from trainkit.engine.defaults import DefaultTrainer


class Twice(DefaultTrainer):
    """Draws two batches in each iteration, and updates with the second one."""

    def run_step(self):
        self._trainer.fetch()
        losses = self.model(self._trainer.fetch())
        self.optimizer.zero_grad()
        losses["loss_cls"].backward()
        self.optimizer.step()


class Around(DefaultTrainer):
    def run_step(self):
        super().run_step()


AMP = ["SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16"]
SKIP = ["SOLVER.NON_FINITE.POLICY", "skip"]


@pytest.mark.parametrize(
    ("trainer_class", "settings", "told"),
    [
        (Twice, [], ["drawn 2 batches", "set it to 2"]),
        (Twice, ["SOLVER.ACCUMULATION_STEPS", 2], []),
        (Twice, [*AMP, "SOLVER.ACCUMULATION_STEPS", 2], ["no effect: SOLVER.AMP.ENABLED"]),
        (Twice, [*SKIP, "SOLVER.ACCUMULATION_STEPS", 2], ["no effect: SOLVER.NON_FINITE.POLICY"]),
        (Around, [*AMP, *SKIP], []),
        (DefaultTrainer, AMP, []),
    ],
)
def test_a_setting_that_a_step_does_not_obey_is_named_once(
    tmp_path, caplog, trainer_class, settings, told
):
    trainer_class(tiny_cfg(tmp_path, "SOLVER.MAX_ITER", 3, *settings)).train()
    found = [record.getMessage() for record in caplog.records if "run_step" in record.getMessage()]
    assert len(found) == bool(told)
    for text in told:
        assert text in found[0]


def test_a_model_that_is_not_finite_is_found_without_a_word_about_its_losses(tmp_path):
    class Ruins(Twice):
        def run_step(self):
            super().run_step()
            with torch.no_grad():
                next(self.model.parameters()).fill_(torch.nan)

    with pytest.raises(FloatingPointError) as caught:
        Ruins(tiny_cfg(tmp_path, "SOLVER.ACCUMULATION_STEPS", 2)).train()
    assert "the model is not finite after iteration" in str(caught.value)
    assert "losses" not in str(caught.value)


class Listens(list):
    """A dataset that notes which epochs it is told."""

    def __init__(self, samples):
        super().__init__(samples)
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_the_epoch_is_told_by_the_batches_that_an_iteration_draws(tmp_path):
    """40 samples in batches of 4, two in each iteration: an epoch has five iterations."""
    data = Listens([{"x": torch.ones(4), "label": 0} for _ in range(40)])

    class Told(Twice):
        @classmethod
        def build_train_loader(cls, cfg):
            return torch.utils.data.DataLoader(data, batch_size=4)

    Told(tiny_cfg(tmp_path, "SOLVER.ACCUMULATION_STEPS", 2, "SOLVER.MAX_ITER", 15)).train()
    assert sorted({*data.epochs}) == [0, 1, 2]
