"""Parts of the jobs of same_bits.py: a GAN with its own step, and a hook that ends the process."""

import os
import sys

import torch
from torch import nn

from trainkit.checkpoint import Checkpointer
from trainkit.data import TrainingSampler, build_batch_data_loader
from trainkit.engine import HookBase, TrainerBase, hooks
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.utils.events import JSONWriter


@HOOK_REGISTRY.register()
class ExitAt(HookBase):
    """Ends the process in an iteration as a kill would."""

    def __init__(self, at: int) -> None:
        self._at = at

    def after_step(self) -> None:
        if self.trainer.iter == self._at:
            os._exit(9)


class GANTrainer(TrainerBase):
    def __init__(self, models, data_loader):
        super().__init__()
        self.models, self.data_loader = models, data_loader
        self.optimizers = {
            name: torch.optim.Adam(models[name].parameters(), 0.002) for name in models
        }
        self.batches = None

    def run_step(self):
        if self.batches is None:
            self.batches = iter(self.data_loader)
        real = torch.stack(next(self.batches))
        fake = self.models["generator"](torch.randn(len(real), 4))
        judge = self.models["discriminator"]
        self.update(
            "discriminator",
            (judge(fake.detach()) - judge(real)).mean() + judge(real).square().mean(),
        )
        self.update("generator", -judge(fake).mean())

    def update(self, name, loss):
        self.optimizers[name].zero_grad()
        loss.backward()
        self.optimizers[name].step()
        self.storage.put_scalar(f"loss_{name}", loss.item())

    def state_dict(self):
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return {
            **super().state_dict(),
            "optimizers": optimizers,
            "data": self.data_loader.state_dict(),
        }


def train_gan(folder):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    models = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    points = [torch.tensor([x / 50, (x / 50) ** 2]) for x in range(100)]
    loader = build_batch_data_loader(
        points, TrainingSampler(len(points), seed=0), 16, num_workers=0
    )
    trainer = GANTrainer(models, loader)
    checkpointer = Checkpointer(models, folder, trainer=trainer)
    writers = [JSONWriter(os.path.join(folder, "metrics.json"))]
    trainer.register_hooks(
        [hooks.PeriodicCheckpointer(checkpointer, 50), hooks.PeriodicWriter(writers, 10)]
    )
    trainer.train(0, 100)


if __name__ == "__main__":
    train_gan(sys.argv[1])
