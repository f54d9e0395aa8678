#!/usr/bin/env python
"""Find the largest batch size: make a few real steps of a job with larger and larger batches until memory runs out.

::

    python tools/find_batch_size.py --config-file job.yaml
    python tools/find_batch_size.py --config-file job.yaml --script train.py --steps 20
    python tools/find_batch_size.py --config-file job.yaml --max-batch-size 512 MODEL.DEVICE cpu

SOLVER.IMS_PER_BATCH starts with the value of the config, and is doubled until a step runs out of memory; then sizes
between the last two are tried. Each size has a new trainer, in one process, without accumulation. Nothing is evaluated,
and the job's output folder is not touched. Hooks of trainkit are left out, hooks of your own modules are kept.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from find_lr import config_of_test
from trainkit.projects.preflight.memory import has_room, search
from user_job import SCRIPT_HELP, find_trainer, only_logging, positive

from predict import ROOT
from trainkit.config import CfgNode, ConfigError, get_cfg
from trainkit.engine import DefaultTrainer, HookBase, user_errors_exit
from trainkit.utils.device import accelerator_runs_ahead, resolve_device
from trainkit.utils.env import seed_all_rng
from trainkit.utils.logger import format_table

_WARM_UP = 2  # steps before the time is measured


@dataclass(frozen=True)
class Trial:
    """Some steps with one batch size.

    Attributes:
        peak_mib: the most memory that tensors had on the accelerator; None on a CPU.
        samples_per_sec: None if memory ran out.
    """

    batch_size: int
    peak_mib: float | None
    samples_per_sec: float | None


class Clock(HookBase):
    """Measures the time of the steps after the warm-up."""

    def before_step(self) -> None:
        if self.trainer.iter == _WARM_UP:
            self.start = _now()

    def after_train(self) -> None:
        if self.trainer.status == "finished":
            self.sec = _now() - self.start


def _now() -> float:
    if accelerator_runs_ahead():
        torch.accelerator.synchronize()
    return time.perf_counter()


def try_size(
    cfg: CfgNode, trainer_class: type[DefaultTrainer], batch_size: int, steps: int
) -> tuple[Trial, int | None]:
    """Train with one batch size; also returns the number of samples of an epoch, None if it is not known."""
    samples, rate = None, None

    def make_steps() -> None:
        nonlocal samples, rate
        with tempfile.TemporaryDirectory() as folder:
            test_cfg = config_of_test(cfg, folder, _WARM_UP + steps)
            test_cfg.defrost()
            test_cfg.SOLVER.IMS_PER_BATCH = batch_size
            seed_all_rng(None if cfg.SEED < 0 else cfg.SEED)
            trainer, clock = trainer_class(test_cfg), Clock()
            trainer.resume_or_load(resume=False)
            trainer.register_hooks([clock])
            samples = round(trainer.epoch_length * batch_size) if trainer.has_epochs else None
            trainer.train()
            rate = steps * batch_size / clock.sec

    has_room(make_steps)
    peak = (
        torch.accelerator.memory.max_memory_allocated() / 2**20
        if accelerator_runs_ahead()
        else None
    )
    return Trial(batch_size, peak, rate), samples


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config-file", default=str(ROOT / "projects/digits/config.yaml"), metavar="FILE"
    )
    parser.add_argument("--script", default="", metavar="FILE", help=SCRIPT_HELP)
    parser.add_argument(
        "--steps",
        type=positive,
        default=5,
        help="steps that are timed for each size (default %(default)s)",
    )
    parser.add_argument(
        "--max-batch-size",
        type=positive,
        metavar="N",
        help="default: the samples of an epoch; needed on a CPU",
    )
    parser.add_argument(
        "opts", nargs="*", default=[], metavar="KEY VALUE", help="changes to the config"
    )
    return parser.parse_intermixed_args(args)


def main(args: argparse.Namespace) -> int:
    """The suggested batch size."""
    cfg = get_cfg()
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    if resolve_device(cfg.MODEL.DEVICE).type == "cpu" and not args.max_batch_size:
        raise ConfigError(
            "on a CPU, memory that runs out may end other programs too; give --max-batch-size, the largest to try"
        )
    solver, trainer_class = cfg.SOLVER, find_trainer(cfg, args.script)
    solver.ACCUMULATION_STEPS, solver.MAX_BATCHES_PER_EPOCH = 1, 0
    solver.LOGICAL_RANKS, solver.REFERENCE_WORLD_SIZE, solver.REFERENCE_BATCH_SIZE = 0, 0, 0
    trials: list[Trial] = []
    limit = args.max_batch_size or sys.maxsize

    def fits(size: int) -> bool:
        nonlocal limit
        trial, samples = try_size(cfg, trainer_class, size, args.steps)
        trials.append(trial)
        if samples and not args.max_batch_size:
            limit = samples
        return trial.samples_per_sec is not None

    with only_logging(logging.CRITICAL):  # here it is no error if memory runs out
        largest = search(fits, min(solver.IMS_PER_BATCH, limit), lambda: limit)
    trials.sort(key=lambda trial: trial.batch_size)
    rows = [
        [
            trial.batch_size,
            "-" if trial.peak_mib is None else f"{trial.peak_mib:,.0f} MiB",
            "out of memory" if trial.samples_per_sec is None else f"{trial.samples_per_sec:,.0f}",
        ]
        for trial in trials
    ]
    print(format_table(rows, ["batch size", "peak memory", "samples/s"], colalign=["right"] * 3))
    if not largest:
        raise ConfigError(
            "SOLVER.IMS_PER_BATCH 1 runs out of memory already; make the model or the samples smaller"
        )
    if trials[-1].samples_per_sec is not None:
        print(f"memory did not run out up to {largest}, the largest size to try (--max-batch-size)")
    fastest = max(trials, key=lambda trial: trial.samples_per_sec or 0.0)
    print(f"fastest: {fastest.batch_size}, with {fastest.samples_per_sec:,.0f} samples/s")
    print(
        f"suggested: SOLVER.IMS_PER_BATCH {largest} for one process; leave some memory if sizes of samples vary"
    )
    return largest


if __name__ == "__main__":
    # so that IMPORTS can name projects, and modules in the current folder
    sys.path += [
        str(ROOT),
        str(Path.cwd()),
    ]
    with user_errors_exit():
        main(parse_args())
