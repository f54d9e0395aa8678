"""Lengths and periods: iterations (``500``) or epochs (``"3ep"``)."""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from fvcore.common.config import CfgNode

from trainkit.utils.errors import ConfigError, not_accepted
from trainkit.utils.periods import Period, as_period, parse_time, round_length

LENGTH_KEYS = frozenset(
    {
        *("SOLVER.MAX_ITER", "SOLVER.STEPS", "SOLVER.WARMUP_ITERS", "SOLVER.CHECKPOINT_PERIOD"),
        *("CHECKPOINT.START", "TEST.EVAL_PERIOD", "TEST.EVAL_START", "LOG.PERIOD", "VIS_PERIOD"),
        "EARLY_STOPPING.START",
    }
)
"""Keys of a config that take iterations or epochs; SOLVER.STEPS takes a list of them."""
TIME_KEYS = frozenset({"SOLVER.CHECKPOINT_PERIOD"})
"""Those of LENGTH_KEYS that also take a time, such as ``30min``."""
_PERIODS = frozenset({"SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD", "LOG.PERIOD", "VIS_PERIOD"})
# an offset of a period keeps its fraction as the period does
_OFFSETS = frozenset({"CHECKPOINT.START", "TEST.EVAL_START"})
# in entries of HOOKS and SOLVER.SCHEDULES, the keys of periods and their offsets
_PERIOD_OF_ENTRY = re.compile(r"(.*_)?(PERIOD|INTERVAL)|START|STEP_SIZE|PERIODS\[\d+\]")
_EPOCHS = re.compile(r"(\d+(?:\.\d+)?)ep")
_Cfg = TypeVar("_Cfg", bound=CfgNode)


@dataclass(frozen=True)
class Epochs:
    """A length in epochs; ``count`` may be a fraction."""

    count: float

    def to_iters(self, epoch_length: int | Fraction) -> int:
        """The nearest number of iterations, at least 1 unless ``count`` is 0."""
        return round_length(Fraction(str(self.count)) * epoch_length)

    def to_period(self, epoch_length: int | Fraction) -> int | Period:
        """A period: a number of iterations that keeps its fraction."""
        return as_period(Fraction(str(self.count)) * Fraction(epoch_length))


@dataclass(frozen=True)
class Seconds:
    """A length in time."""

    count: float


def parse_length(value: object, key: str = "length") -> int | Epochs | Seconds:
    """Read one length, the value of ``key``. Raises ConfigError if it is neither an int nor a text such as "3ep".

    A key of `TIME_KEYS` also takes a time, see `trainkit.utils.periods.parse_time`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    match = _EPOCHS.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        return Epochs(float(match[1]))
    accepted = 'iterations (an int, such as 500) or epochs (such as "3ep" or "0.5ep")'
    if key in TIME_KEYS:
        with contextlib.suppress(ConfigError):
            return Seconds(parse_time(value, key))
        accepted = accepted.replace(" or epochs", ", epochs") + ', or a time (such as "30min")'
    raise not_accepted(key, value, accepted)


def resolve_lengths(cfg: _Cfg, epoch_length: int | Fraction | None) -> _Cfg:
    """A copy of ``cfg`` with all lengths in iterations; it is frozen if ``cfg`` is.

    A length is an int. A period, and its offset, that is not a whole number of iterations is a `Period`.

    Args:
        epoch_length: iterations per pass over the training data, not rounded; None if the data has no length: a length
            in epochs is then a ConfigError.
    """

    def resolve(key: str, value: Any, in_steps: bool = False) -> Any:
        if isinstance(value, CfgNode):  # a copy that knows what was set
            node = value.clone()
            for name, item in value.items():
                node[name] = resolve(f"{key}.{name}", item)
            return node
        if isinstance(value, Mapping):
            # a schedule divides these lengths by STEP_SIZE, and rounds then
            rounded_later = value.keys() - {"BEGIN", "END"} if "STEP_SIZE" in value else set()
            return {
                name: resolve(f"{key}.{name}", item, name in rounded_later)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return type(value)(
                resolve(f"{key}[{i}]", item, in_steps) for i, item in enumerate(value)
            )
        if not isinstance(value, str) or not _EPOCHS.fullmatch(value):
            return value
        if epoch_length is None:
            raise not_accepted(key, value, "iterations, since an epoch of these data has no length")
        epochs = Epochs(float(value[:-2]))
        if key in _PERIODS or key in _OFFSETS:
            return epochs.to_period(epoch_length)
        name = key.rpartition(".")[2]
        if in_steps or (key not in LENGTH_KEYS and _PERIOD_OF_ENTRY.fullmatch(name)):
            return epochs.to_period(epoch_length)
        return epochs.to_iters(epoch_length)

    resolved = cfg.clone()
    # in entries, every text such as "3ep" is a length
    for key in [
        *sorted(LENGTH_KEYS),
        "HOOKS",
        "SOLVER.SCHEDULES",
    ]:
        *parents, name = key.split(".")
        node = resolved[parents[0]] if parents else resolved
        if name in node:  # a project may declare it
            node[name] = resolve(key, node[name])  # by item, which works for a frozen node too
    return resolved


def check_lengths_go_on(cfg: CfgNode, done: int, old_epoch: Fraction, new_epoch: Fraction) -> None:
    """Check that no length is in epochs, in a run that is resumed with another number of iterations per epoch.

    Iterations are counted from the start of the run, so an epoch of another length would move every length.

    Args:
        done: the iterations that are done, with ``old_epoch`` iterations per epoch.

    Raises:
        ConfigError: a length is in epochs. The message has each of them in iterations: ``done`` and those of the epochs
            that are left, with ``new_epoch`` iterations per epoch.
    """
    epochs_done = done / old_epoch

    def in_iterations(key: str, epochs: Fraction) -> int:
        if key in _PERIODS:
            return max(round(epochs * new_epoch), 1)
        if epochs <= epochs_done:
            return round(epochs * old_epoch)
        return done + round((epochs - epochs_done) * new_epoch)

    settings = []
    for key in sorted(LENGTH_KEYS, key=lambda key: (key != "SOLVER.MAX_ITER", key)):
        *parents, name = key.split(".")
        node = cfg[parents[0]] if parents else cfg
        value = node.get(name)
        if isinstance(value, list | tuple) and any(_is_in_epochs(item) for item in value):
            lengths = [
                in_iterations(key, _epochs_in(item)) if _is_in_epochs(item) else item
                for item in value
            ]
            settings.append(f"{key} '{(*lengths,)}'")
        elif _is_in_epochs(value):
            settings.append(f"{key} {in_iterations(key, _epochs_in(value))}")
    lists = {"HOOKS": cfg.HOOKS, "SOLVER.SCHEDULES": cfg.SOLVER.get("SCHEDULES", [])}
    entries = [name for name, entries in lists.items() if _has_epochs(entries)]
    if not settings and not entries:
        return
    remedies = []
    if settings:
        remedies.append(f"set {' '.join(settings)}")
    if entries:
        remedies.append(f"give the lengths in {' and '.join(entries)} in iterations")
    raise ConfigError(
        f"lengths in epochs would move: an epoch has {float(new_epoch):g} iterations now, and had "
        f"{float(old_epoch):g} in the checkpoint, in which {float(epochs_done):g} epochs are done. To train the epochs "
        f"that are left, {' and '.join(remedies)}; or resume with the former batch size and data"
    )


def _is_in_epochs(value: Any) -> bool:
    return isinstance(value, str) and _EPOCHS.fullmatch(value) is not None


def _epochs_in(text: str) -> Fraction:
    return Fraction(text.removesuffix("ep"))


def _has_epochs(value: Any) -> bool:
    """Whether a value in nested lists and mappings is a length in epochs."""
    if isinstance(value, Mapping):
        return any(_has_epochs(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_has_epochs(item) for item in value)
    return _is_in_epochs(value)
