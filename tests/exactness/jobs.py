"""The kinds of runs that must resume exactly; each one is small."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from tests.engine.job import tiny_cfg
from tests.same_bits_jobs import GANTrainer
from trainkit.checkpoint import Checkpointer
from trainkit.config import CfgNode
from trainkit.data import ResumableLoader, TrainingSampler, build_batch_data_loader
from trainkit.engine import (
    DefaultTrainer,
    HookBase,
    SimpleTrainer,
    TrainerBase,
    create_ddp_model,
    hooks,
)
from trainkit.utils import comm
from trainkit.utils.events import JSONWriter


class Configured:
    """A DefaultTrainer with these settings; ``hooks`` make further hooks."""

    max_iter = None  # that of the config

    def __init__(
        self,
        *options: Any,
        make_cfg: Callable[..., CfgNode] = tiny_cfg,
        trainer_class: type[DefaultTrainer] = DefaultTrainer,
        hooks: Sequence[Callable[[], HookBase]] = (),
    ) -> None:
        self.options, self.make_cfg, self.trainer_class = options, make_cfg, trainer_class
        self.hooks = hooks

    def __call__(self, folder: Path) -> TrainerBase:
        trainer = self.trainer_class(self.make_cfg(folder, *self.options))
        trainer.resume_or_load()
        trainer.register_hooks([make() for make in self.hooks])
        return trainer


class Scripted:
    """A script: its parts, a checkpoint every 3 and a line of metrics every 2 of 13 iterations."""

    max_iter = 13

    def parts(self) -> tuple[TrainerBase, nn.Module, list[HookBase]]:
        """Trainer, model, and further hooks."""
        raise NotImplementedError

    def __call__(self, folder: Path) -> TrainerBase:
        trainer, model, more = self.parts()
        checkpointer = Checkpointer(model, str(folder), trainer=trainer)
        writers = [JSONWriter(str(folder / "metrics.json"))] if comm.is_main_process() else []
        trainer.register_hooks(
            [*more, hooks.PeriodicCheckpointer(checkpointer, 3), hooks.PeriodicWriter(writers, 2)]
        )
        checkpointer.resume_or_load("", resume=True)
        return trainer


class GAN(Scripted):
    """A ``run_step`` of its own, with two optimizers."""

    def parts(self):
        generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        discriminator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        models = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
        points = [torch.tensor([x / 50, (x / 50) ** 2]) for x in range(30)]
        loader = build_batch_data_loader(
            points, TrainingSampler(len(points), seed=0), 8, num_workers=0
        )
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


class FiniteData(Scripted):
    """18 samples in batches of 4, so each fifth has 2; two hooks of one class. ``options`` are of the loader."""

    def __init__(self, *, accumulation_steps=1, **options):
        self.accumulation_steps, self.options = accumulation_steps, options

    def parts(self):
        loader = ResumableLoader(SAMPLES, sampler=Shuffling(), batch_size=4, seed=1, **self.options)
        model = Dropping()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)
        trainer = SimpleTrainer(
            model, loader, optimizer, accumulation_steps=self.accumulation_steps
        )
        return trainer, model, [Smoothed("fast", 0.5), Smoothed("slow", 0.9)]


class Forgetful(FiniteData):
    """A mistake: the state of a hook is not saved."""

    def parts(self):
        trainer, model, _ = super().parts()
        forgetful = type("Forgetful", (Smoothed,), {"state_dict": HookBase.state_dict})
        return trainer, model, [forgetful("smoothed", 0.9)]


class Student(DefaultTrainer):
    """A second model follows the first one, in a ``run_step`` of its own."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.teacher = self.build_model(cfg)
        self.checkpointer.add_checkpointable("teacher", self.teacher)

    def run_step(self):
        super().run_step()
        for theirs, ours in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            theirs.data.lerp_(ours.data, 0.1)


class Shuffled(nn.Module):
    """Calls its layers in another order than it has them, so that DDP puts its buckets into another one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(37, 37) for _ in range(5))

    def forward(self, x):
        for i in (3, 0, 4, 1, 2):
            x = torch.tanh(self.layers[i](x)) + x
        return (x * torch.rand(x.shape)).square().mean()


class Buckets(Scripted):
    """DDP with one of its options; three ranks add up gradients in an order that the buckets decide."""

    max_iter = 8

    def __init__(self, trainer_class=SimpleTrainer, **options):
        self.trainer_class, self.options = trainer_class, options

    def parts(self):
        model = create_ddp_model(Shuffled(), **self.options)
        generator = torch.Generator().manual_seed(comm.get_rank())
        data = [torch.randn(4, 37, generator=generator)] * 100
        return self.trainer_class(model, data, torch.optim.SGD(model.parameters(), 0.1)), model, []
