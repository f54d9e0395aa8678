"""Lengths and periods: iterations (``500``) or epochs (``"3ep"``)."""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeGuard, TypeVar

from fvcore.common.config import CfgNode

from trainkit.utils.errors import ConfigError, not_accepted
from trainkit.utils.periods import Period, as_period, parse_time, round_length
from trainkit.utils.plugins import find_plugins

LENGTH_KEYS = frozenset(
    {
        "SOLVER.MAX_ITER",
        "SOLVER.STEPS",
        "SOLVER.WARMUP_ITERS",
        "SOLVER.CHECKPOINT_PERIOD",
        "CHECKPOINT.START",
        "TEST.EVAL_PERIOD",
        "TEST.EVAL_START",
        "LOG.PERIOD",
        "VIS_PERIOD",
        "EARLY_STOPPING.START",
    }
)
"""Keys of a config that take iterations or epochs; SOLVER.STEPS takes a list of them."""
TIME_KEYS = frozenset({"SOLVER.CHECKPOINT_PERIOD"})
"""Those of LENGTH_KEYS that also take a time, such as ``30min``."""
_PERIODS = frozenset({"SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD", "LOG.PERIOD", "VIS_PERIOD"})
# an offset of a period keeps its fraction as the period does
_OFFSETS = frozenset({"CHECKPOINT.START", "TEST.EVAL_START"})
# in entries of HOOKS and of projects' lists, the keys of periods and their offsets
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
    """Read one length, the value of ``key``.

    A key of `TIME_KEYS` also takes a time, see `trainkit.utils.periods.parse_time`.

    Raises:
        ConfigError: it is neither an int nor a text such as "3ep".
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if _is_in_epochs(value):
        return Epochs(_epochs_in(value))
    iterations = "iterations (an int, such as 500)"
    epochs = 'epochs (such as "3ep" or "0.5ep")'
    if key not in TIME_KEYS:
        raise not_accepted(key, value, f"{iterations} or {epochs}")
    with contextlib.suppress(ConfigError):
        return Seconds(parse_time(value, key))
    raise not_accepted(key, value, f'{iterations}, {epochs}, or a time (such as "30min")')


def resolve_lengths(cfg: _Cfg, epoch_length: int | Fraction | None) -> _Cfg:
    """A copy of ``cfg`` with all lengths in iterations; it is frozen if ``cfg`` is.

    A length is an int. A period, and its offset, that is not a whole number of iterations is a
    `Period`.

    Args:
        epoch_length: iterations per pass over the training data, not rounded; None if the data has
            no length: a length in epochs is then a ConfigError.
    """
    resolved = cfg.clone()
    for key in [*sorted(LENGTH_KEYS), *_lists_of_entries()]:
        node, name = _node_of(resolved, key)
        if name in node:  # a key of a project may be missing
            # by item, which works for a frozen node too
            node[name] = _resolve(key, node[name], epoch_length)
    return resolved


def _lists_of_entries() -> list[str]:
    """Keys of lists in which every text such as "3ep" is a length."""
    return ["HOOKS", *find_plugins().length_lists]


def _node_of(cfg: CfgNode, key: str) -> tuple[CfgNode, str]:
    """The node that has the key, and the name of the key in it."""
    *parents, name = key.split(".")
    node = cfg
    for parent in parents:
        node = node.get(parent, CfgNode())  # a node of a project may be missing
    return node, name


def _resolve(
    key: str, value: Any, epoch_length: int | Fraction | None, keeps_fraction: bool = False
) -> Any:
    """``value`` with every length in it in iterations.

    Args:
        keeps_fraction: a length becomes a `Period` whatever its key is.
    """
    if isinstance(value, CfgNode):
        node = value.clone()  # it knows what was set
        for name, item in value.items():
            node[name] = _resolve(f"{key}.{name}", item, epoch_length)
        return node
    if isinstance(value, Mapping):
        entry = {}
        for name, item in value.items():
            # a schedule divides its lengths by STEP_SIZE, and rounds then
            is_in_steps = "STEP_SIZE" in value and name not in ("BEGIN", "END")
            entry[name] = _resolve(f"{key}.{name}", item, epoch_length, is_in_steps)
        return entry
    if isinstance(value, list | tuple):
        items = []
        for i, item in enumerate(value):
            items.append(_resolve(f"{key}[{i}]", item, epoch_length, keeps_fraction))
        return type(value)(items)
    if not _is_in_epochs(value):
        return value
    if epoch_length is None:
        raise not_accepted(key, value, "iterations, since an epoch of these data has no length")
    epochs = Epochs(_epochs_in(value))
    if keeps_fraction or _is_period(key):
        return epochs.to_period(epoch_length)
    return epochs.to_iters(epoch_length)


def _is_period(key: str) -> bool:
    """Whether it is the key of a period or of its offset, which are not rounded."""
    if key in LENGTH_KEYS:
        return key in _PERIODS or key in _OFFSETS
    name = key.rpartition(".")[2]
    return _PERIOD_OF_ENTRY.fullmatch(name) is not None


def check_lengths_go_on(cfg: CfgNode, done: int, old_epoch: Fraction, new_epoch: Fraction) -> None:
    """Check that no length is in epochs, for a resumed run whose epochs have another length.

    Iterations are counted from the start of the run, so an epoch of another length would move every
    length.

    Args:
        done: the iterations that are done, with ``old_epoch`` iterations per epoch.

    Raises:
        ConfigError: a length is in epochs. The message has each of them in iterations: ``done`` and
            those of the epochs that are left, with ``new_epoch`` iterations per epoch.
    """
    epochs_done = done / old_epoch

    def in_iterations(key: str, length: Any) -> Any:
        if not _is_in_epochs(length):
            return length
        epochs = Fraction(length.removesuffix("ep"))
        if key in _PERIODS:
            return max(round(epochs * new_epoch), 1)
        if epochs <= epochs_done:
            return round(epochs * old_epoch)
        return done + round((epochs - epochs_done) * new_epoch)

    settings = []
    most_important = "SOLVER.MAX_ITER"
    others = LENGTH_KEYS - {most_important}
    for key in [most_important, *sorted(others)]:
        node, name = _node_of(cfg, key)
        value = node.get(name)
        if not _has_epochs(value):
            continue
        if isinstance(value, list | tuple):
            lengths = tuple(in_iterations(key, item) for item in value)
            settings.append(f"{key} '{lengths}'")
        else:
            settings.append(f"{key} {in_iterations(key, value)}")
    lists = []
    for key in _lists_of_entries():
        node, name = _node_of(cfg, key)
        if _has_epochs(node.get(name)):
            lists.append(key)
    remedies = []
    if settings:
        remedies.append(f"set {' '.join(settings)}")
    if lists:
        remedies.append(f"give the lengths in {' and '.join(lists)} in iterations")
    if not remedies:
        return
    raise ConfigError(
        f"lengths in epochs would move: an epoch has {float(new_epoch):g} iterations now, and had "
        f"{float(old_epoch):g} in the checkpoint, in which {float(epochs_done):g} epochs are done. "
        f"To train the epochs that are left, {' and '.join(remedies)}; or resume with the former "
        "batch size and data"
    )


def _is_in_epochs(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and _EPOCHS.fullmatch(value) is not None


def _epochs_in(text: str) -> float:
    return float(text.removesuffix("ep"))


def _has_epochs(value: Any) -> bool:
    """Whether a value in nested lists and mappings is a length in epochs."""
    if isinstance(value, Mapping):
        return any(_has_epochs(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_has_epochs(item) for item in value)
    return _is_in_epochs(value)
