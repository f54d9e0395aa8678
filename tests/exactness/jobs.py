"""The kinds of runs that must resume exactly; each one is small."""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, Sampler

from tests.engine.job import tiny_cfg
from tests.same_bits_jobs import GANTrainer
from trainkit.checkpoint import Checkpointer
from trainkit.data import ResumableLoader, TrainingSampler, build_batch_data_loader
from trainkit.engine import DefaultTrainer, HookBase, SimpleTrainer, TrainerBase, hooks
from trainkit.utils.events import JSONWriter


class Configured:
    """A DefaultTrainer with these settings."""

    def __init__(self, *options: Any, has_epochs: bool = True) -> None:
        self.options, self.has_epochs = options, has_epochs

    def build(self, folder: Path) -> TrainerBase:
        trainer = DefaultTrainer(tiny_cfg(folder, *self.options))
        trainer.resume_or_load()
        return trainer

    def train(self, trainer: Any) -> None:
        trainer.train()


class Scripted:
    """A script: its parts, a checkpoint every 3 and a line of metrics every 2 of 13 iterations."""

    num_iters, has_epochs = 13, False

    def parts(self) -> tuple[TrainerBase, nn.Module, list[HookBase]]:
        """Trainer, model, and further hooks."""
        raise NotImplementedError

    def build(self, folder: Path) -> TrainerBase:
        trainer, model, more = self.parts()
        checkpointer = Checkpointer(model, str(folder), trainer=trainer)
        writers = [JSONWriter(str(folder / "metrics.json"))]
        trainer.register_hooks([*more, hooks.PeriodicCheckpointer(checkpointer, 3), hooks.PeriodicWriter(writers, 2)])
        checkpointer.resume_or_load("", resume=True)
        self.start = trainer.last_done_iter + 1 if checkpointer.has_checkpoint() else 0
        return trainer

    def train(self, trainer: TrainerBase) -> None:
        trainer.train(self.start, self.num_iters)


class GAN(Scripted):
    """A ``run_step`` of its own, with two optimizers."""

    def parts(self):
        generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        discriminator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        models = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
        points = [torch.tensor([x / 50, (x / 50) ** 2]) for x in range(30)]
        loader = build_batch_data_loader(points, TrainingSampler(len(points), seed=0), 8, num_workers=0)
        return ResumedGAN(models, loader), models, []


class ResumedGAN(GANTrainer):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state_dict["optimizers"][name])
        self.data_loader.load_state_dict(state_dict["data"])


class Dropping(nn.Module):
    """Four numbers -> their sum, with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, batch):
        return (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()


class Smoothed(HookBase):
    """A state of its own, from the batch and the losses of each step."""

    def __init__(self, name, decay):
        self.name, self.decay, self.value = name, decay, 0.0

    def after_step(self):
        loss = self.trainer.losses["total_loss"].item() + len(self.trainer.batch)
        self.value = self.decay * self.value + (1 - self.decay) * loss
        self.trainer.storage.put_scalar(self.name, self.value)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


SAMPLES = torch.randn(18, 4, generator=torch.Generator().manual_seed(0))


class Shuffling(Sampler):
    """A finite sampler of a user, with another order in each pass."""

    epoch = 0

    def __iter__(self):
        yield from torch.randperm(18, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1

    def __len__(self):
        return 18

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class Stream(IterableDataset):
    """Samples without indices, which knows its position."""

    def __init__(self):
        self.sampler, self.count = Shuffling(), 0

    def __iter__(self):
        for index in itertools.islice(self.sampler, self.count, None):
            self.count += 1
            yield SAMPLES[index]
        self.count = 0

    def state_dict(self):
        return {**self.sampler.state_dict(), "count": self.count}

    def load_state_dict(self, state):
        self.sampler.load_state_dict(state)
        self.count = state["count"]


class FiniteData(Scripted):
    """18 samples in batches of 4, so each fifth has 2; two hooks of one class.

    Args:
        stream: the data have no indices.
        options: of the loader.
    """

    def __init__(self, *, stream=False, accumulation_steps=1, **options):
        self.stream, self.accumulation_steps, self.options = stream, accumulation_steps, options
        self.has_epochs = not stream

    def parts(self):
        source = {"dataset": Stream()} if self.stream else {"dataset": SAMPLES, "sampler": Shuffling()}
        loader = ResumableLoader(**source, batch_size=4, seed=1, **self.options)
        model = Dropping()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)
        trainer = SimpleTrainer(model, loader, optimizer, accumulation_steps=self.accumulation_steps)
        return trainer, model, [Smoothed("fast", 0.5), Smoothed("slow", 0.9)]


class Forgetful(FiniteData):
    """A mistake: the state of a hook is not saved."""

    def parts(self):
        trainer, model, _ = super().parts()
        forgetful = type("Forgetful", (Smoothed,), {"state_dict": HookBase.state_dict})
        return trainer, model, [forgetful("smoothed", 0.9)]
