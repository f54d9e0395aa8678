"""The tiny job as a script starts it, and faults to plant in it."""

import hashlib
import os
from pathlib import Path

import torch

from tests.engine.job import TinyClassifier, tiny_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer, HookBase, default_argument_parser, default_setup
from trainkit.modeling import MODEL_REGISTRY


def train(folder, *words, options=(), hooks=(), base=DefaultTrainer):
    """What a script does whose settings are those of the tiny job and ``options``; ``words`` are its arguments."""
    args = default_argument_parser().parse_args([*map(str, words)])
    cfg = tiny_cfg(folder, *options)
    cfg.merge_from_list(args.opts)
    cfg.freeze()
    default_setup(cfg, args)
    trainer = base(cfg)
    trainer.register_hooks(hooks)
    trainer.resume_or_load(args.resume)
    trainer.train()
    return trainer


class Job:
    """Called: what the script of a run does."""

    def __init__(self, folder, *options, make_hooks=lambda: [], base=DefaultTrainer):
        self.folder, self.options, self.make_hooks, self.base = folder, options, make_hooks, base

    def __call__(self, *words):
        return train(self.folder, *words, options=self.options, hooks=self.make_hooks(), base=self.base)


class Killed(Exception):
    pass


class KillAt(HookBase):
    def __init__(self, at):
        self.at = at

    def before_step(self):
        if self.trainer.iter == self.at:
            raise Killed


class Batches(HookBase):
    """The inputs of the steps, by iteration."""

    def __init__(self):
        self.xs = {}

    def after_backward(self):
        self.xs[self.trainer.iter] = self.trainer.batch["x"]


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
