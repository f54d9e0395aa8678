#!/usr/bin/env python
"""Find a learning rate: train while it grows from --min to --max, and draw the loss over it (a range test).

::

    python tools/find_lr.py --config-file job.yaml
    python tools/find_lr.py --config-file job.yaml --min 1e-5 --max 1 --iters 400 --output lr.png SEED 1
    python tools/find_lr.py --config-file output/mine/config.yaml --script train.py

The suggested BASE_LR is where the loss falls most steeply. The model starts as in a run of the job, from
MODEL.WEIGHTS if there are any; parameter groups keep their factors. The job's output folder is not touched: the picture
is the only file that is written. Hooks of trainkit are left out, hooks of your own modules are kept.
"""

import argparse
import importlib
import importlib.util
import logging
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from user_job import SCRIPT_HELP, find_trainer, only_logging

from predict import ROOT, check_writable
from trainkit.config import CfgNode, ConfigError, get_cfg, import_modules
from trainkit.engine import DefaultTrainer, user_errors_exit
from trainkit.engine.hooks import HOOK_REGISTRY, HookBase
from trainkit.utils.env import seed_all_rng

_SMOOTHING = 0.9  # weight of the earlier losses in the smoothed loss
_DIVERGED = 4.0  # the test ends at this multiple of the lowest smoothed loss
_FALLEN = 0.9  # after a divergence the model has learned only if the loss is below this multiple of the first loss
_MIN_POINTS = 10  # fewer steps give no suggestion
_DECADES = 1.5  # the fall of the loss is measured over this many powers of ten of the learning rate
_FEW = 100  # with fewer steps than this there is a warning


@dataclass(frozen=True)
class Point:
    """The values of one step."""

    lr: float
    loss: float
    smoothed: float


class RangeTest(HookBase):
    """Let the learning rate grow by the same factor in each step; stop where the loss diverges.

    Args:
        base_lr: SOLVER.BASE_LR; the learning rate of a parameter group divided by it is the factor of the group.
    """

    def __init__(self, low: float, high: float, base_lr: float) -> None:
        self._low, self._high, self._base_lr = low, high, base_lr
        self._average = 0.0
        self.points: list[Point] = []

    def before_train(self) -> None:
        groups = self.trainer.optimizer.param_groups
        self._factors = [group.get("initial_lr", group["lr"]) / self._base_lr for group in groups]

    def _lr(self) -> float:
        share = self.trainer.iter / max(1, self.trainer.max_iter - 1)
        return self._low * (self._high / self._low) ** share

    def before_step(self) -> None:
        for group, factor in zip(self.trainer.optimizer.param_groups, self._factors, strict=True):
            group["lr"] = self._lr() * factor

    def after_step(self) -> None:
        loss = self.trainer.storage.history("total_loss").latest()
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
        smoothed = self._average / (1 - _SMOOTHING ** (len(self.points) + 1))
        lowest = min((point.smoothed for point in self.points), default=math.inf)
        if not math.isfinite(loss) or (
            len(self.points) >= _MIN_POINTS and smoothed > _DIVERGED * lowest
        ):
            self.trainer.request_stop("the loss diverges")
            return
        self.points.append(Point(self._lr(), loss, smoothed))


def config_of_test(cfg: CfgNode, folder: str, iters: int) -> CfgNode:
    """A copy of the config that evaluates, saves and writes nothing, except into ``folder``."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR, cfg.LOG.WRITERS = folder, "", []
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS, cfg.SOLVER.WARMUP_ITERS, cfg.SOLVER.SCHEDULES = (
        iters,
        (),
        0,
        [],
    )
    cfg.SOLVER.CHECKPOINT_PERIOD, cfg.CHECKPOINT.START, cfg.CHECKPOINT.SAVE_LAST = 0, 0, False
    cfg.CHECKPOINT.BEST_METRIC, cfg.CHECKPOINT.PUBLISH, cfg.EARLY_STOPPING.METRIC = "", "", ""
    cfg.EARLY_STOPPING.THRESHOLD, cfg.CHECKPOINT.BEST_TO_KEEP = None, 1
    cfg.DATASETS.VAL, cfg.DATASETS.TEST, cfg.TEST.EVAL_PERIOD, cfg.TEST.EVAL_AT_START = (
        (),
        (),
        0,
        False,
    )
    cfg.TEST.EXPECTED_RESULTS, cfg.TEST.PRECISE_BN.ENABLED = [], False
    # the test needs the loss of each step
    cfg.LOG.ASYNC, cfg.LOG.GATHER_PERIOD = False, 1
    cfg.SOLVER.NON_FINITE.POLICY, cfg.SOLVER.GRAPH.ENABLED = "ignore", False
    import_modules(cfg.IMPORTS)
    names = {entry if isinstance(entry, str) else entry.get("NAME") for entry in cfg.HOOKS}
    own = {name for name in names if name in HOOK_REGISTRY and not _is_of_trainkit(name)}
    cfg.HOOKS = [
        entry
        for entry in cfg.HOOKS
        if (entry if isinstance(entry, str) else entry.get("NAME")) in own
    ]
    cfg.freeze()
    return cfg


def _is_of_trainkit(name: Any) -> bool:
    return str(HOOK_REGISTRY.get(name).__module__).startswith("trainkit.")


def run_test(
    cfg: CfgNode, trainer_class: type[DefaultTrainer], low: float, high: float, iters: int
) -> list[Point]:
    """The steps of a range test.

    Raises:
        ConfigError: too few steps were possible.
    """
    with tempfile.TemporaryDirectory() as folder:
        test_cfg = config_of_test(cfg, folder, iters)
        seed_all_rng(None if cfg.SEED < 0 else cfg.SEED)
        trainer = trainer_class(test_cfg)
        trainer.resume_or_load(resume=False)
        test = RangeTest(low, high, cfg.SOLVER.BASE_LR)
        trainer.register_hooks([test])
        trainer.train()
    if len(test.points) < _MIN_POINTS:
        raise ConfigError(
            f"the loss diverges after {len(test.points)} steps; give a smaller --min than {low:g}"
        )
    return test.points


def suggest(points: Sequence[Point]) -> tuple[float, float]:
    """The learning rate where the loss falls most steeply (over its logarithm), and the later rate of lowest loss.

    The first is the middle of a range of `_DECADES` in which a line is fitted to the losses: from one step to the next
    they differ mostly by the noise of the batches. The second has the lowest smoothed loss.

    Raises:
        ConfigError: the loss never falls, or only after it has diverged.
    """
    logs, losses = (
        np.log10([point.lr for point in points]),
        np.array([point.loss for point in points]),
    )
    per_decade = (len(points) - 1) / (logs[-1] - logs[0])
    width = min(max(_MIN_POINTS // 2, round(_DECADES * per_decade)), len(points) // 2)
    parts = [slice(start, start + width) for start in range(len(points) - width + 1)]
    lowest = int(np.argmin([losses[part].mean() for part in parts]))
    slopes = [np.polyfit(logs[part], losses[part], 1)[0] for part in parts[: lowest + 1]]
    steepest = int(np.argmin(slopes))
    if slopes[steepest] >= 0:
        raise ConfigError(
            f"the loss does not fall with any of these learning rates ({len(points)} steps, {points[0].lr:.2g} to "
            f"{points[-1].lr:.2g}); give more --iters (200 are usual), larger batches, or a smaller --min"
        )
    middle = steepest + width // 2
    few = _MIN_POINTS // 2
    fell = (
        min(losses[i : i + few].mean() for i in range(len(points) - few + 1)) < _FALLEN * losses[0]
    )
    if not fell and max(point.smoothed for point in points[:middle]) > _DIVERGED * losses[0]:
        raise ConfigError(
            f"the loss diverges in the first steps; give a smaller --min than {points[0].lr:.2g}"
        )
    return 10 ** logs[parts[steepest]].mean(), min(
        points[middle:], key=lambda point: point.smoothed
    ).lr


def draw(points: Sequence[Point], suggested: float, path: Path) -> None:
    """Draw the loss over the learning rate into a PNG file."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        (6.4, 4.0), dpi=110, layout="constrained"
    )
    axes = figure.add_subplot()
    lrs = [point.lr for point in points]
    axes.plot(
        lrs,
        [point.loss for point in points],
        color="#c9ced6",
        linewidth=1,
        label="loss of each step",
    )
    axes.plot(
        lrs, [point.smoothed for point in points], color="#1f6fb2", linewidth=2, label="smoothed"
    )
    axes.axvline(suggested, color="#d1495b", linestyle="--", label=f"steepest at {suggested:.2g}")
    top = 1.5 * max(point.smoothed for point in points[: len(points) // 2])
    axes.set_ylim(
        min(point.loss for point in points) * 0.95,
        min(top, max(point.loss for point in points) * 1.05),
    )
    axes.set(xscale="log", xlabel="learning rate (SOLVER.BASE_LR)", ylabel="total_loss")
    axes.grid(color="#e8eaed")
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


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
    parser.add_argument(
        "--min", type=float, default=1e-5, help="the first learning rate (default %(default)s)"
    )
    parser.add_argument(
        "--max", type=float, default=10.0, help="the last learning rate (default %(default)s)"
    )
    parser.add_argument("--iters", type=int, default=200, help="steps (default %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("lr.png"), metavar="PNG", help="default: %(default)s"
    )
    parser.add_argument("--script", default="", metavar="FILE", help=SCRIPT_HELP)
    parser.add_argument(
        "opts", nargs="*", default=[], metavar="KEY VALUE", help="changes to the config"
    )
    return parser.parse_args(args)


def main(args: argparse.Namespace) -> float:
    """The suggested learning rate."""
    if not 0 < args.min < args.max < math.inf:
        raise ConfigError(
            f"--min is {args.min:g} and --max is {args.max:g}; accepted: 0 < min < max"
        )
    if args.iters < 2 * _MIN_POINTS:
        raise ConfigError(f"--iters is {args.iters}; accepted: {2 * _MIN_POINTS} or more")
    check_writable(str(args.output))
    cfg = get_cfg()
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    trainer_class = find_trainer(cfg, args.script)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the picture needs the package matplotlib: pip install 'trainkit[plot]'")
    with only_logging(logging.WARNING):
        points = run_test(cfg, trainer_class, args.min, args.max, args.iters)
    steepest, lowest = suggest(points)
    draw(points, steepest, args.output)
    end = "" if len(points) == args.iters else ", where the loss diverged"
    print(f"{len(points)} steps, learning rates from {args.min:g} to {points[-1].lr:.2g}{end}")
    print(
        f"the loss falls most steeply at {steepest:.2g}, and is lowest at {lowest:.2g}; the curve is in {args.output}"
    )
    print(f"suggested: SOLVER.BASE_LR {steepest:.2g}")
    if args.iters < _FEW:
        print(
            f"few steps show more of the batches than of the learning rate; --iters {2 * _FEW} is more reliable"
        )
    return steepest


if __name__ == "__main__":
    # so that IMPORTS can name projects, and modules in the current folder
    sys.path += [
        str(ROOT),
        str(Path.cwd()),
    ]
    with user_errors_exit():
        main(parse_args())
