"""Find a learning rate: train while it grows from --min to --max, and draw the loss over it.

::

    python -m trainkit.projects.finders.lr --config-file job.yaml
    python -m trainkit.projects.finders.lr --config-file job.yaml --max 1 --iters 400 SEED 1
    python -m trainkit.projects.finders.lr --config-file output/mine/config.yaml --script train.py

This is a range test (Smith, arXiv:1506.01186). The suggested BASE_LR is where the loss falls most
steeply. The model starts as in a run of the job, from MODEL.WEIGHTS if there are any; parameter
groups keep their factors. The job's output folder is not touched: the picture is the only file that
is written. Hooks of trainkit are left out, hooks of your own modules are kept.
"""

import argparse
import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from trainkit.projects.finders.command import check_writable, new_parser, only_logging
from trainkit.projects.finders.script import find_trainer
from trainkit.projects.finders.trial import trial

from trainkit.config import CfgNode, ConfigError, get_cfg
from trainkit.engine import DefaultTrainer, HookBase, user_errors_exit

_SMOOTHING = 0.9  # weight of the earlier losses in the smoothed loss
_DIVERGED = 4.0  # the test ends at this multiple of the lowest smoothed loss
# after a divergence the model has learned only if the loss is below this multiple of the first loss
_FALLEN = 0.9
_MIN_POINTS = 10  # fewer steps give no suggestion
_NEIGHBOURS = 5  # their mean is less noisy than one loss
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
        base_lr: SOLVER.BASE_LR; the learning rate of a parameter group divided by it is the factor
            of the group.
    """

    def __init__(self, low: float, high: float, base_lr: float) -> None:
        self._low = low
        self._high = high
        self._base_lr = base_lr
        self._average = 0.0
        self._lowest = math.inf  # smoothed loss
        self._factors: list[float] = []
        self.points: list[Point] = []

    def before_train(self) -> None:
        self._factors = []
        for group in self.trainer.optimizer.param_groups:
            lr = group.get("initial_lr", group["lr"])
            self._factors.append(lr / self._base_lr)

    def _lr(self) -> float:
        share = self.trainer.iter / max(1, self.trainer.max_iter - 1)
        return self._low * (self._high / self._low) ** share

    def before_step(self) -> None:
        groups = self.trainer.optimizer.param_groups
        for group, factor in zip(groups, self._factors, strict=True):
            group["lr"] = self._lr() * factor

    def after_step(self) -> None:
        loss = self.trainer.storage.history("total_loss").latest()
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
        # the average starts at 0; this divides by the weight of the losses in it
        smoothed = self._average / (1 - _SMOOTHING ** (len(self.points) + 1))
        is_late = len(self.points) >= _MIN_POINTS
        if not math.isfinite(loss) or (is_late and smoothed > _DIVERGED * self._lowest):
            self.trainer.request_stop("the loss diverges")
            return
        self._lowest = min(self._lowest, smoothed)
        self.points.append(Point(self._lr(), loss, smoothed))


def run_test(
    cfg: CfgNode, trainer_class: type[DefaultTrainer], low: float, high: float, iters: int
) -> list[Point]:
    """The steps of a range test.

    Raises:
        ConfigError: too few steps were possible.
    """
    test = RangeTest(low, high, cfg.SOLVER.BASE_LR)
    with trial(cfg, trainer_class, iters) as trainer:
        trainer.register_hooks([test])
        trainer.train()
    num_steps = len(test.points)
    if num_steps < _MIN_POINTS:
        raise ConfigError(
            f"the loss diverges after {num_steps} steps; give a smaller --min than {low:g}"
        )
    return test.points


def suggest(points: Sequence[Point]) -> tuple[float, float]:
    """The learning rate where the loss falls most steeply, and the later rate of the lowest loss.

    From one step to the next, losses differ mostly by the noise of the batches. So a line is fitted
    to the losses over the logarithms of the rates in each range of `_DECADES`; the middle of the
    steepest one is the first result. The second one has the lowest smoothed loss.

    Raises:
        ConfigError: the loss never falls, or only after it has diverged.
    """
    logs = np.log10([point.lr for point in points])
    losses = np.array([point.loss for point in points])
    steps_per_decade = (len(points) - 1) / (logs[-1] - logs[0])
    width = max(_NEIGHBOURS, round(_DECADES * steps_per_decade))
    width = min(width, len(points) // 2)
    ranges = [slice(start, start + width) for start in range(len(points) - width + 1)]
    lowest = int(np.argmin([losses[part].mean() for part in ranges]))
    slopes = [np.polyfit(logs[part], losses[part], 1)[0] for part in ranges[: lowest + 1]]
    steepest = int(np.argmin(slopes))
    if slopes[steepest] >= 0:
        rates = f"{points[0].lr:.2g} to {points[-1].lr:.2g}"
        raise ConfigError(
            "the loss does not fall with any of these learning rates "
            f"({len(points)} steps, {rates}); give more --iters (200 are usual), larger batches, "
            "or a smaller --min"
        )
    middle = steepest + width // 2
    if not _has_fallen(losses) and _has_diverged(points[:middle]):
        raise ConfigError(
            f"the loss diverges in the first steps; give a smaller --min than {points[0].lr:.2g}"
        )
    lowest_point = min(points[middle:], key=lambda point: point.smoothed)
    return 10 ** logs[ranges[steepest]].mean(), lowest_point.lr


def _has_fallen(losses: np.ndarray) -> bool:
    """Whether the mean of neighbouring losses is clearly below the first loss somewhere."""
    starts = range(len(losses) - _NEIGHBOURS + 1)
    means = [losses[start : start + _NEIGHBOURS].mean() for start in starts]
    return min(means) < _FALLEN * losses[0]


def _has_diverged(points: Sequence[Point]) -> bool:
    return max(point.smoothed for point in points) > _DIVERGED * points[0].loss


def draw(points: Sequence[Point], suggested: float, path: Path) -> None:
    """Draw the loss over the learning rate into a PNG file."""
    figure_class = importlib.import_module("matplotlib.figure").Figure
    figure = figure_class((6.4, 4.0), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    lrs = [point.lr for point in points]
    losses = [point.loss for point in points]
    smoothed = [point.smoothed for point in points]
    axes.plot(lrs, losses, color="#c9ced6", linewidth=1, label="loss of each step")
    axes.plot(lrs, smoothed, color="#1f6fb2", linewidth=2, label="smoothed")
    axes.axvline(suggested, color="#d1495b", linestyle="--", label=f"steepest at {suggested:.2g}")
    # where the loss diverges, it would squeeze all else
    top = 1.5 * max(smoothed[: len(points) // 2])
    axes.set_ylim(min(losses) * 0.95, min(top, max(losses) * 1.05))
    axes.set(xscale="log", xlabel="learning rate (SOLVER.BASE_LR)", ylabel="total_loss")
    axes.grid(color="#e8eaed")
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser("trainkit.projects.finders.lr", __doc__)
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
    parser.add_argument(
        "opts", nargs="*", default=[], metavar="KEY VALUE", help="changes to the config"
    )
    return parser.parse_intermixed_args(args)


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
    if args.config_file:
        cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    trainer_class = find_trainer(cfg, args.script)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the picture needs the package matplotlib: pip install 'trainkit[plot]'")
    with only_logging("WARNING"):
        points = run_test(cfg, trainer_class, args.min, args.max, args.iters)
    steepest, lowest = suggest(points)
    draw(points, steepest, args.output)
    end = "" if len(points) == args.iters else ", where the loss diverged"
    print(f"{len(points)} steps, learning rates from {args.min:g} to {points[-1].lr:.2g}{end}")
    places = f"falls most steeply at {steepest:.2g}, and is lowest at {lowest:.2g}"
    print(f"the loss {places}; the curve is in {args.output}")
    print(f"suggested: SOLVER.BASE_LR {steepest:.2g}")
    if args.iters < _FEW:
        print(
            "few steps show more of the batches than of the learning rate; "
            f"--iters {2 * _FEW} is more reliable"
        )
    return steepest


if __name__ == "__main__":
    with user_errors_exit():
        main(parse_args())
