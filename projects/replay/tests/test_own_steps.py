"""Trainers that make their steps themselves: a replay says what it can see of them, and nothing else."""

import argparse

import pytest
import torch
from torch import nn
from trainkit.projects.replay import replay
from trainkit.projects.replay.tests.job import Overflow

from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer, default_setup
from trainkit.modeling import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class Pair(nn.Module):
    """A generator and a critic, which are called one by one."""

    def __init__(self, cfg):
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1), Overflow(cfg.MODEL.BAD_CALL))


class Adversaries(DefaultTrainer):
    """Two optimizers; the iterator ``mine``, if any, is the trainer's own."""

    mine = None

    def __init__(self, cfg):
        super().__init__(cfg)
        self.of_critic = torch.optim.SGD(self.model.critic.parameters(), lr=0.1)

    def run_step(self):
        batch = next(self.mine or self._trainer._data_loader_iter)
        fake = self.model.generator(batch["x"])
        loss = self.model.critic(batch["x"]).mean() - self.model.critic(fake.detach()).mean()
        self.of_critic.zero_grad()
        loss.backward()
        self.of_critic.step()
        loss_of_generator = self.model.critic(fake).mean()
        self.optimizer.zero_grad()
        loss_of_generator.backward()
        self.optimizer.step()
        self.storage.put_scalars(loss_critic=loss.item(), loss_generator=loss_of_generator.item())
        if not loss.isfinite():
            raise FloatingPointError("the loss of the critic is not finite")


class Game:
    def __init__(self, folder, has_iterator=False, bad_call=-1):
        self.folder, self.has_iterator, self.bad_call = folder, has_iterator, bad_call

    def __call__(self):
        more = ("MODEL.NAME", "Pair", "MODEL.BAD_CALL", self.bad_call, "DATASETS.TEST", ())
        cfg = tiny_cfg(self.folder, *more)
        default_setup(cfg, argparse.Namespace(resume=False, eval_only=False))
        trainer = Adversaries(cfg)
        trainer.mine = iter(trainer.data_loader) if self.has_iterator else None
        trainer.resume_or_load(False)
        return trainer.train()


def test_a_step_with_two_optimizers_shows_its_batch_modules_and_gradients(tmp_path):
    game = Game(tmp_path)
    game()

    found = replay(tmp_path, 7, game)

    assert found.batch["x"].shape == (8, 4)
    assert len(found.samples) == 8
    assert [name for name, _ in found.inspection.outputs][:3] == ["generator", "critic.0", "critic.1"]
    assert found.losses.keys() == {"loss_critic", "loss_generator", "lr"}
    assert found.gradients.keys() == dict(Pair(tiny_cfg(tmp_path, "MODEL.BAD_CALL", 0)).named_parameters()).keys()
    assert found.on_the_way.startswith("9 of 9 logged values equal those in model_final.pth")
    assert found.verdict.startswith("reproducible: repeated in this process, every bit is equal")


def test_the_first_module_that_is_not_finite_is_named(tmp_path):
    game = Game(tmp_path, bad_call=22)  # the second call of the critic in iteration 7
    with pytest.raises(FloatingPointError):
        game()

    found = replay(tmp_path, 7, game, verdict=False, bisect=True)

    assert found.error.startswith("FloatingPointError: the loss of the critic")
    assert found.first_bad_module == "critic.1"
    assert "they cannot be looked at one by one" in found.samples_at_fault


def test_an_iterator_of_the_trainer_is_no_fault_of_the_machine(tmp_path):
    game = Game(tmp_path, has_iterator=True)
    game()

    found = replay(tmp_path, 3, game)

    assert found.on_the_way.endswith("logged values equal those in model_0000004.pth, iterations 0 to 3")
    assert found.verdict.startswith("transient, or with a state that no checkpoint holds: in this process it differs")
    assert "differs in the batch" in found.verdict
