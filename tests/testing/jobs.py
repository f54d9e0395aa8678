"""Small jobs for the assertions of trainkit.testing: a sound one, and one for each fault."""

import random
from functools import partial

import torch
from torch import nn
from torch.utils.data import Dataset

from trainkit.checkpoint import Checkpointer
from trainkit.data import TrainingSampler, build_batch_data_loader
from trainkit.engine import HookBase, SimpleTrainer, hooks
from trainkit.utils.events import JSONWriter


class Noisy(Dataset):
    """40 samples of 4 numbers, with noise of a global generator."""

    def __init__(self):
        self.samples = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index] + 0.1 * self.noise()

    def noise(self):
        return torch.randn(4)


class OwnGenerator(Noisy):
    """A fault: a generator of its own, which nobody saves."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def noise(self):
        return torch.randn(4, generator=self.generator)


class Model(nn.Module):
    """The sum of 4 numbers, with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, batch):
        return (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()


class HiddenOptimizer(SimpleTrainer):
    """A fault: the optimizer with the momentum is a private attribute."""

    def __init__(self, model, loader, optimizer):
        super().__init__(model, loader, torch.optim.SGD(model.parameters(), 0.0))
        self._second = optimizer

    def after_backward(self):
        super().after_backward()
        self._second.step()


class Counter(HookBase):
    """Counts the steps, and keeps the number over a resume."""

    def __init__(self):
        self.count = 0

    def after_step(self):
        self.count += 1
        self.trainer.storage.put_scalar("count", self.count)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


class Forgetful(HookBase):
    """A fault: a counter without a state."""

    def __init__(self):
        self.count = 0

    def after_step(self):
        self.count += 1
        self.trainer.storage.put_scalar("count", self.count)


class DrawnAtStart(HookBase):
    """A fault: a number that is drawn in before_train, if the run was not resumed."""

    scale = 1.0

    def before_train(self):
        if self.trainer.start_iter == 0:
            self.scale = torch.rand(()).item()

    def after_backward(self):
        for parameter in self.trainer.model.parameters():
            parameter.grad *= self.scale


class DrawsOnce(HookBase):
    """A fault: the first step of each process draws one more random number."""

    is_new = True

    def before_step(self):
        if self.is_new:
            torch.rand(())
        self.is_new = False


class EndsEarly(HookBase):
    """A fault: ends the run after ten steps of this process."""

    steps = 0

    def after_step(self):
        self.steps += 1
        if self.steps == 10:
            self.trainer.request_stop("ten steps are enough", finished=True)


IMPORTED = []


class CountsInModule(HookBase):
    """A fault that is seen in a new process only: the state is in a list of the module."""

    def after_step(self):
        IMPORTED.append(0)
        self.trainer.storage.put_scalar("count", len(IMPORTED))


def trainer(
    folder,
    num_workers=0,
    *,
    dataset=Noisy,
    trainer_class=SimpleTrainer,
    make_hooks=(Counter,),
    period=3,
    loads=True,
):
    model = Model()
    data = dataset()
    loader = build_batch_data_loader(
        data, TrainingSampler(len(data), seed=0), 8, num_workers=num_workers, collate_fn=torch.stack
    )
    built = trainer_class(model, loader, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
    checkpointer = Checkpointer(model, str(folder), trainer=built)
    built.register_hooks([make() for make in make_hooks])
    built.register_hooks(
        [
            hooks.PeriodicCheckpointer(checkpointer, period),
            hooks.PeriodicWriter([JSONWriter(str(folder / "metrics.json"))], 2),
        ]
    )
    if loads:
        checkpointer.resume_or_load("", resume=True)
    return built


def unreproducible(folder, num_workers=0):
    """The same in each run but for a metric that no seed changes."""
    built = trainer(folder)
    entropy = random.SystemRandom()
    built.register_hooks([hooks.CallbackHook(after_step=partial(_put, entropy))])
    return built


def _put(entropy, trainer):
    trainer.storage.put_scalar("entropy", entropy.random())


def plain_loader(folder):
    """A fault: a loader without a state."""
    model = Model()
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True)
    built = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), 0.01))
    checkpointer = Checkpointer(model, str(folder), trainer=built)
    built.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 3)])
    checkpointer.resume_or_load("", resume=True)
    return built


def hidden_optimizer(folder):
    return trainer(folder, trainer_class=HiddenOptimizer)


def drawn_at_start(folder):
    return trainer(folder, make_hooks=[DrawnAtStart])


def ends_early(folder):
    return trainer(folder, make_hooks=[EndsEarly])


def draws_once(folder):
    return trainer(folder, make_hooks=[DrawsOnce])


def own_generator(folder, num_workers=0):
    return trainer(folder, num_workers, dataset=OwnGenerator)


def forgetful(folder):
    return trainer(folder, make_hooks=[Forgetful])


def counts_in_module(folder):
    return trainer(folder, make_hooks=[CountsInModule])


def without_load(folder):
    return trainer(folder, loads=False)


def failing(folder):
    if folder.name != "whole":
        raise RuntimeError("the disk is gone")
    return trainer(folder)
