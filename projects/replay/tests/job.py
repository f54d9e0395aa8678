"""The tiny job as a script starts it, and faults to plant in it."""

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
from torch import nn

from tests.engine.job import TinyClassifier, tiny_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer, HookBase, default_setup
from trainkit.modeling import MODEL_REGISTRY


class Job:
    """Called: what the script of a run does."""

    def __init__(self, folder, *options, make_hooks=lambda: []):
        self.folder, self.options, self.make_hooks = folder, options, make_hooks

    def __call__(self, resume=False, *options):
        cfg = tiny_cfg(self.folder, *self.options, *options)
        cfg.freeze()
        default_setup(cfg, argparse.Namespace(resume=resume, eval_only=False))
        trainer = DefaultTrainer(cfg)
        trainer.register_hooks(self.make_hooks())
        trainer.resume_or_load(resume)
        return trainer.train()


class PlantNan(HookBase):
    """Sets a weight to NaN before the step of one iteration."""

    def __init__(self, name, at):
        self.name, self.at = name, at

    def before_step(self):
        if self.trainer.iter == self.at:
            with torch.no_grad():
                self.trainer.model.get_parameter(self.name).view(-1)[0] = float("nan")


class StopAt(HookBase):
    def __init__(self, at):
        self.at = at

    def after_step(self):
        if self.trainer.iter == self.at:
            self.trainer.request_stop("enough")


class Overflow(nn.Module):
    """Gives inf in iteration ``at``, counted by a buffer."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += self.training
        return x * float("inf") if self.training and self.count == self.at + 1 else x


class ReadsClock(nn.Module):
    """Adds a reading of the clock in one forward pass of this process."""

    at = None

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + time.perf_counter() if self.calls == self.at else x


@MODEL_REGISTRY.register()
class ClockClassifier(TinyClassifier):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.layers.insert(3, ReadsClock())


@MODEL_REGISTRY.register()
class ListClassifier(TinyClassifier):
    def forward(self, batch):
        return super().forward(torch.utils.data.default_collate(batch))


class Scans(torch.utils.data.Dataset):
    """40 samples; that of index 17 has a NaN."""

    def __len__(self):
        return 40

    def sample_name(self, index):
        return f"scan_{index:03d}.png"

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        if index == 17:
            x[2] = float("nan")
        return {"x": x, "label": int(index % 2)}


DatasetCatalog.register("tiny_scans", Scans)


def digest_of_folder(folder):
    """Of all names, contents and times of change."""
    found = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*")):
        found.update(f"{path} {os.stat(path).st_mtime_ns}".encode())
        if path.is_file():
            found.update(path.read_bytes())
    found.update(f"{os.stat(folder).st_mtime_ns}".encode())
    return found.hexdigest()
