"""Clients that take their optimizer from ``build_optimizer`` and expect that its ``step()`` clips."""

import itertools

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Regression, batches, scalars
from trainkit.config import get_cfg
from trainkit.engine import AMPTrainer, DefaultTrainer, SimpleTrainer
from trainkit.solver import GradientClipper, build_lr_scheduler, build_optimizer
from trainkit.utils.events import EventStorage


def clip(clip_type, value):
    options = {"ENABLED": True, "CLIP_TYPE": clip_type, "CLIP_VALUE": value}
    return [item for key, option in options.items() for item in (f"SOLVER.CLIP_GRADIENTS.{key}", option)]


def clipping_cfg(clip_type, value, *options):
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.BASE_LR", 1.0, "SOLVER.MOMENTUM", 0.0, "SOLVER.WEIGHT_DECAY", 0.0])
    cfg.merge_from_list([*clip(clip_type, value), *options])
    return cfg


def test_a_plain_loop_with_a_schedule_and_full_model_clipping_trains_as_one_that_clips_itself():
    def trained(cfg, clipper=None):
        model = Regression()
        optimizer = build_optimizer(cfg, model)
        scheduler = build_lr_scheduler(cfg, optimizer)
        with EventStorage():
            for batch in batches(6):
                optimizer.zero_grad()
                model(batch).backward()
                if clipper is not None:
                    clipper(parameter for group in optimizer.param_groups for parameter in group["params"])
                optimizer.step()
                scheduler.step()
        return [*model.parameters()]

    schedule = ["SOLVER.WARMUP_ITERS", 2, "SOLVER.STEPS", (4,), "SOLVER.MAX_ITER", 6]
    cfg = clipping_cfg("full_model", 0.1, *schedule)
    off = clipping_cfg("full_model", 0.1, *schedule, "SOLVER.CLIP_GRADIENTS.ENABLED", False)
    assert all(map(torch.equal, trained(cfg), trained(off, GradientClipper("full_model", 0.1))))
    assert not any(map(torch.equal, trained(cfg), trained(off)))


def norms_at_the_step(optimizer):
    """Of the gradients that each update has seen."""
    norms = []

    def note(optimizer, args, kwargs):
        grads = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        norms.append(nn.utils.get_total_norm(grads).item())

    optimizer.register_step_post_hook(note)
    return norms


@pytest.mark.parametrize(
    ("trainer_class", "by_trainer"), [(SimpleTrainer, False), (AMPTrainer, False), (AMPTrainer, True)]
)
def test_either_the_trainer_clips_or_the_optimizer(trainer_class, by_trainer):
    model = Regression()
    optimizer = build_optimizer(clipping_cfg("full_model", 0.01), model)
    norms = norms_at_the_step(optimizer)
    options = {"precision": torch.bfloat16} if trainer_class is AMPTrainer else {}
    options["clip_gradients"] = optimizer.gradient_clipper if by_trainer else None
    trainer = trainer_class(model, itertools.cycle(batches(2)), optimizer, **options)
    trainer.train(0, 2)
    assert norms == [pytest.approx(0.01, rel=1e-3)] * 2
    assert ("grad_norm" in trainer.storage.histories()) is by_trainer
    optimizer.zero_grad()
    (model(batches(1)[0]) * 1000).backward()
    optimizer.step()  # outside of the trainer it clips again
    assert norms[-1] <= 0.01 * 1.001


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
    trainer = trainer_class(tiny_cfg(tmp_path, *clip("full_model", 1e-3)))
    norms = norms_at_the_step(trainer.optimizer)
    trainer.train()
    assert norms == [pytest.approx(1e-3, rel=1e-3)] * 10
    has_norm = "grad_norm" in trainer.storage.histories()
    assert has_norm is (trainer_class is not OwnStep)
    if has_norm:
        assert min(value for value, _ in scalars(trainer)["grad_norm"]) > 0.01  # that before clipping
