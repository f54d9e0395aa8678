"""Find the largest batch size: make some steps with larger and larger batches until memory runs out.

::

    python -m trainkit.projects.finders.batch_size --config-file job.yaml
    python -m trainkit.projects.finders.batch_size --config-file job.yaml --script train.py
    python -m trainkit.projects.finders.batch_size --config-file job.yaml --max-batch-size 512

SOLVER.IMS_PER_BATCH starts with the value of the config, and is doubled until a step runs out of
memory; then sizes between the last two are tried. Each size has a new trainer, in one process,
without accumulation. Nothing is evaluated, and the job's output folder is not touched. Hooks of
trainkit are left out, hooks of your own modules are kept.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from trainkit.projects.finders.command import new_parser, only_logging, positive
from trainkit.projects.finders.memory import has_room, search
from trainkit.projects.finders.script import find_trainer
from trainkit.projects.finders.trial import trial

from trainkit.config import CfgNode, ConfigError, get_cfg
from trainkit.engine import DefaultTrainer, HookBase, user_errors_exit
from trainkit.utils.device import accelerator_runs_ahead, resolve_device
from trainkit.utils.logger import format_table

_WARM_UP = 2  # steps before the time is measured


@dataclass(frozen=True)
class Measurement:
    """What some steps with one batch size have shown.

    Attributes:
        peak_mib: the most memory that tensors had on the accelerator; None on a CPU.
        samples_per_sec: None if memory ran out.
    """

    batch_size: int
    peak_mib: float | None
    samples_per_sec: float | None


class Clock(HookBase):
    """Measures the time of the steps after the warm-up."""

    sec: float

    def before_step(self) -> None:
        if self.trainer.iter == _WARM_UP:
            self._start = _now()

    def after_train(self) -> None:
        if self.trainer.status == "finished":
            self.sec = _now() - self._start


def _now() -> float:
    if accelerator_runs_ahead():
        torch.accelerator.synchronize()
    return time.perf_counter()


def try_size(
    cfg: CfgNode, trainer_class: type[DefaultTrainer], batch_size: int, steps: int
) -> tuple[Measurement, int | None]:
    """Train with one batch size.

    Returns:
        The measurement, and the number of samples of an epoch, None if it is not known.
    """
    samples: int | None = None
    rate: float | None = None

    def make_steps() -> None:
        nonlocal samples, rate
        cfg_of_size = cfg.clone()
        cfg_of_size.defrost()
        cfg_of_size.SOLVER.IMS_PER_BATCH = batch_size
        clock = Clock()
        with trial(cfg_of_size, trainer_class, _WARM_UP + steps) as trainer:
            trainer.register_hooks([clock])
            if trainer.has_epochs:
                samples = round(trainer.epoch_length * batch_size)
            trainer.train()
        rate = steps * batch_size / clock.sec

    has_room(make_steps)
    peak_mib: float | None = None
    if accelerator_runs_ahead():
        peak_mib = torch.accelerator.memory.max_memory_allocated() / 2**20
    return Measurement(batch_size, peak_mib, rate), samples


def try_sizes(
    cfg: CfgNode, trainer_class: type[DefaultTrainer], steps: int, max_batch_size: int | None
) -> tuple[int, list[Measurement]]:
    """The largest size that fits, 0 if none does, and the measurements, the smallest size first.

    Args:
        max_batch_size: no larger size is tried; None: the samples of an epoch.
    """
    measured: list[Measurement] = []
    limit = max_batch_size or sys.maxsize

    def fits(size: int) -> bool:
        nonlocal limit
        found, samples = try_size(cfg, trainer_class, size, steps)
        measured.append(found)
        if samples and not max_batch_size:
            limit = samples
        return found.samples_per_sec is not None

    largest = search(fits, min(cfg.SOLVER.IMS_PER_BATCH, limit), lambda: limit)
    measured.sort(key=lambda found: found.batch_size)
    return largest, measured


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser("trainkit.projects.finders.batch_size", __doc__)
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
    if args.config_file:
        cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    if resolve_device(cfg.MODEL.DEVICE).type == "cpu" and not args.max_batch_size:
        raise ConfigError(
            "on a CPU, memory that runs out may end other programs too; give --max-batch-size, "
            "the largest to try"
        )
    trainer_class = find_trainer(cfg, args.script)
    cfg.SOLVER.ACCUMULATION_STEPS = 1
    cfg.SOLVER.MAX_BATCHES_PER_EPOCH = 0
    cfg.SOLVER.LOGICAL_RANKS = 0
    cfg.SOLVER.REFERENCE_WORLD_SIZE = 0
    cfg.SOLVER.REFERENCE_BATCH_SIZE = 0
    with only_logging("CRITICAL"):  # here it is no error if memory runs out
        largest, measured = try_sizes(cfg, trainer_class, args.steps, args.max_batch_size)
    print(_table(measured))
    if not largest:
        raise ConfigError(
            "SOLVER.IMS_PER_BATCH 1 runs out of memory already; make the model or the samples "
            "smaller"
        )
    if measured[-1].samples_per_sec is not None:
        print(f"memory did not run out up to {largest}, the largest size to try (--max-batch-size)")
    fastest = max(measured, key=lambda found: found.samples_per_sec or 0.0)
    print(f"fastest: {fastest.batch_size}, with {fastest.samples_per_sec:,.0f} samples/s")
    print(
        f"suggested: SOLVER.IMS_PER_BATCH {largest} for one process; leave some memory if sizes "
        "of samples vary"
    )
    return largest


def _table(measured: Sequence[Measurement]) -> str:
    rows = []
    for found in measured:
        peak = "-"
        if found.peak_mib is not None:
            peak = f"{found.peak_mib:,.0f} MiB"
        rate = "out of memory"
        if found.samples_per_sec is not None:
            rate = f"{found.samples_per_sec:,.0f}"
        rows.append([found.batch_size, peak, rate])
    return format_table(rows, ["batch size", "peak memory", "samples/s"], colalign=["right"] * 3)


if __name__ == "__main__":
    with user_errors_exit():
        main(parse_args())
