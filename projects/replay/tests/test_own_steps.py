"""Trainers that make their steps themselves: a replay says what it can see of them, and nothing else."""

import pytest
import torch
from torch import nn
from trainkit.projects.replay import replay
from trainkit.projects.replay.tests.job import Job, plant_nan

from trainkit.engine import DefaultTrainer
from trainkit.modeling import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class Pair(nn.Module):
    """A generator and a critic, which are called one by one."""

    def __init__(self, cfg):
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


class Adversaries(DefaultTrainer):
    """Two optimizers; the iterator ``mine``, if any, is the trainer's own."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.of_critic = torch.optim.SGD(self.model.critic.parameters(), lr=0.1)
        self.mine = iter(self.data_loader) if cfg.MODEL.OWN_ITERATOR else None

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


def game(folder, *hooks, own_iterator=False):
    own = ("MODEL.NAME", "Pair", "MODEL.OWN_ITERATOR", own_iterator, "DATASETS.TEST", ())
    return Job(folder, *own, make_hooks=lambda: hooks, base=Adversaries)


def test_a_step_with_two_optimizers_shows_its_batch_modules_and_gradients_and_the_bad_module(tmp_path):
    play = game(tmp_path, plant_nan("critic.1.bias", 7))
    with pytest.raises(FloatingPointError):
        play()

    good, bad = replay(tmp_path, 6, play), replay(tmp_path, 7, play, verdict=False, bisect=True)

    assert (good.batch["x"].shape, len(good.samples)) == ((8, 4), 8)
    assert [name for name, _ in good.inspection.outputs][:3] == ["generator", "critic.0", "critic.1"]
    assert good.losses.keys() == {"loss_critic", "loss_generator", "lr"}
    assert len(good.gradients) == 6  # weights and biases of three layers
    assert good.on_the_way.startswith("6 of 6 logged values equal those in capsule.rank0.pt")
    assert good.verdict.startswith("reproducible: repeated in this process, every bit is equal")
    assert bad.error.startswith("FloatingPointError: the loss of the critic")
    assert bad.first_bad_module == "critic.1"
    assert "they cannot be looked at one by one" in bad.samples_at_fault


def test_an_iterator_of_the_trainer_is_no_fault_of_the_machine(tmp_path):
    play = game(tmp_path, own_iterator=True)
    play()

    found = replay(tmp_path, 3, play)

    assert found.on_the_way.endswith("logged values equal those in model_0000004.pth, iterations 0 to 3")
    assert found.verdict.startswith("transient, or with a state that no checkpoint holds: in this process it differs")
    assert "differs in the batch" in found.verdict
