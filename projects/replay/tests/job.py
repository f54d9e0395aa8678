"""The tiny job as a script starts it, and faults to plant in it."""

import hashlib
from pathlib import Path

import torch
from torch import nn

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
        return train(
            self.folder, *words, options=self.options, hooks=self.make_hooks(), base=self.base
        )


class Killed(Exception):
    pass


class At(HookBase):
    """Raises an error, or calls a function with the trainer, at a point of one iteration."""

    def __init__(self, iter, action, point="before_step"):
        self._iter, self._action = iter, action
        setattr(self, point, self._act)

    def _act(self):
        if self.trainer.iter == self._iter:
            if isinstance(self._action, Exception):
                raise self._action
            self._action(self.trainer)


def stop_at(iter):
    return At(iter, lambda trainer: trainer.request_stop("enough"), "after_step")


def plant(value, name, iter):
    """Fills a parameter before a step."""
    return At(iter, lambda trainer: nn.init.constant_(trainer.model.get_parameter(name), value))


def plant_nan(name, iter):
    return plant(float("nan"), name, iter)


class Keep(HookBase):
    """What the steps have had, by iteration."""

    def __init__(self):
        self.xs, self.losses, self.gradients = {}, {}, {}

    def after_backward(self):
        iter = self.trainer.iter
        self.xs[iter], self.losses[iter] = self.trainer.batch["x"], {**self.trainer.losses}
        self.gradients[iter] = {
            name: p.grad.clone() for name, p in self.trainer.model.named_parameters()
        }


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
    for path in [Path(folder), *sorted(Path(folder).rglob("*"))]:
        found.update(f"{path} {path.stat().st_mtime_ns}".encode())
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()
