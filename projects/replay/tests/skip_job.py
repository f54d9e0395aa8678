"""A run that notes the batch of each step."""

import argparse
import contextlib

import torch

from tests.engine.job import tiny_cfg
from trainkit.config import CfgNode
from trainkit.data import TRANSFORM_REGISTRY
from trainkit.engine import DefaultTrainer, HookBase, default_setup


@TRANSFORM_REGISTRY.register()
def AddNoise(cfg: CfgNode):
    """Its draws are equal for equal positions in the stream only."""
    return lambda sample: {**sample, "x": sample["x"] + torch.rand(4)}


class Killed(Exception):
    pass


class Seen(HookBase):
    """What the steps got, by iteration; stops the run after iteration ``last``, or kills it before ``killed_at``."""

    def __init__(self, last=None, killed_at=None):
        self.batches, self.last, self.killed_at = {}, last, killed_at

    def before_step(self):
        if self.trainer.iter == self.killed_at:
            raise Killed

    def after_backward(self):
        batch = self.trainer.batch
        batches = batch if isinstance(batch, list) else [batch]
        self.batches[self.trainer.iter] = torch.cat([batch["x"] for batch in batches])

    def after_step(self):
        if self.trainer.iter == self.last:
            self.trainer.request_stop("enough")


def train(folder, *options, last=None, killed_at=None, resume=False):
    cfg = tiny_cfg(folder, "INPUT.TRAIN_TRANSFORM", "AddNoise", "TEST.EVAL_PERIOD", 0, "DATASETS.TEST", (), *options)
    cfg.freeze()
    default_setup(cfg, argparse.Namespace(resume=resume, eval_only=False))
    trainer, seen = DefaultTrainer(cfg), Seen(last, killed_at)
    trainer.register_hooks([seen])
    trainer.resume_or_load(resume)
    with contextlib.suppress(Killed):
        trainer.train()
    return trainer, seen


def same(found, plain, numbers):
    """Whether the batches found are those of these iterations of the plain run."""
    pairs = [(found[iter], plain[number]) for iter, number in sorted(numbers.items())]
    return sorted(found) == sorted(numbers) and all(torch.equal(*pair) for pair in pairs)
