"""Clients that take their optimizer from ``build_optimizer`` and expect that its ``step()`` clips."""

import itertools

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import scalars
from trainkit.engine import DefaultTrainer

CLIP = {"ENABLED": True, "CLIP_TYPE": "full_model", "CLIP_VALUE": 1e-3}
OPTIONS = [item for key, option in CLIP.items() for item in (f"SOLVER.CLIP_GRADIENTS.{key}", option)]


def norms_at_the_step(optimizer):
    """Of the gradients that each update has seen."""
    norms = []

    def note(optimizer, args, kwargs):
        grads = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        norms.append(nn.utils.get_total_norm(grads).item())

    optimizer.register_step_post_hook(note)
    return norms


class OwnStep(DefaultTrainer):
    """Steps the optimizer itself, as trainers of unbiased-teacher do."""

    def run_step(self):
        batch = next(self._trainer._data_loader_iter)
        losses = self.model(batch)
        self.optimizer.zero_grad()
        sum(losses.values()).backward()
        self._trainer._write_metrics(losses, 0.0)
        self.optimizer.step()


class Mask2FormerLike(DefaultTrainer):
    """Its optimizer clips the norm of the whole model in a step() of its own."""

    @classmethod
    def build_optimizer(cls, cfg, model):
        class FullModelClipping(torch.optim.AdamW):
            def step(self, closure=None):
                params = itertools.chain(*[group["params"] for group in self.param_groups])
                nn.utils.clip_grad_norm_(params, cfg.SOLVER.CLIP_GRADIENTS.CLIP_VALUE)
                super().step(closure=closure)

        return FullModelClipping(model.parameters(), 0.1)


@pytest.mark.parametrize("trainer_class", [DefaultTrainer, OwnStep, Mask2FormerLike])
def test_a_default_trainer_clips_whoever_makes_its_step(tmp_path, trainer_class):
    trainer = trainer_class(tiny_cfg(tmp_path, *OPTIONS))
    norms = norms_at_the_step(trainer.optimizer)
    trainer.train()
    assert norms == [pytest.approx(1e-3, rel=1e-3)] * 10
    has_norm = "grad_norm" in trainer.storage.histories()
    assert has_norm is (trainer_class is not OwnStep)
    if has_norm:
        assert min(value for value, _ in scalars(trainer)["grad_norm"]) > 0.01  # that before clipping
