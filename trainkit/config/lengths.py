"""Lengths and periods: iterations (``500``) or epochs (``"3ep"``)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any, TypeVar

from fvcore.common.config import CfgNode

from trainkit.config.errors import not_accepted
from trainkit.utils.periods import exact, whole_or_rounded

LENGTH_KEYS = frozenset(
    {
        "SOLVER.MAX_ITER",
        "SOLVER.STEPS",  # a list of lengths
        "SOLVER.WARMUP_ITERS",
        "SOLVER.CHECKPOINT_PERIOD",
        "CHECKPOINT.START",
        "TEST.EVAL_PERIOD",
        "TEST.EVAL_START",
        "LOG.PERIOD",
        "VIS_PERIOD",
    }
)
"""Keys of a config that take iterations or epochs."""
ENTRY_KEYS = ("HOOKS", "SOLVER.SCHEDULES")  # lists of entries, in which every text such as "3ep" is a length
LENGTH_FORMS = 'iterations (an int, such as 500) or epochs (such as "3ep" or "0.5ep")'

_EPOCHS = re.compile(r"(\d+(?:\.\d+)?)ep")
_Cfg = TypeVar("_Cfg", bound=CfgNode)


@dataclass(frozen=True)
class Epochs:
    """A length in epochs; ``count`` may be a fraction."""

    count: float

    def to_iters(self, iters_per_epoch: int) -> int:
        """The nearest number of iterations, at least 1 unless ``count`` is 0. A period in epochs keeps its fraction."""
        return whole_or_rounded(Fraction(str(self.count)) * exact(iters_per_epoch))


def parse_length(value: object, key: str = "length") -> int | Epochs:
    """Read one length; a number of iterations is returned as it is.

    Args:
        key: the key that has the value, for errors.

    Raises:
        ConfigError: ``value`` is neither an int (a bool does not count) nor a text such as "3ep".
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    match = _EPOCHS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise not_accepted(key, value, LENGTH_FORMS)
    return Epochs(float(match[1]))


def resolve_lengths(cfg: _Cfg, iters_per_epoch: int | None) -> _Cfg:
    """A copy of ``cfg`` with all lengths in iterations; it is frozen if ``cfg`` is.

    Args:
        iters_per_epoch: iterations per pass over the training data; None if the data has no length.

    Raises:
        ConfigError: a length is in epochs while ``iters_per_epoch`` is None.
        ValueError: ``iters_per_epoch`` is not above 0.
    """
    if iters_per_epoch is not None and iters_per_epoch <= 0:
        raise ValueError(f"iters_per_epoch must be None or above 0, got {iters_per_epoch}")
    resolved = cfg.clone()
    for full_key in [*sorted(LENGTH_KEYS), *ENTRY_KEYS]:
        *parents, name = full_key.split(".")
        node: Any = reduce(lambda node, parent: node.get(parent, {}), parents, resolved)
        if name in node:  # by item, which works for a frozen node too
            node[name] = _resolve(full_key, node[name], iters_per_epoch)
    return resolved


def _resolve(where: str, value: Any, iters_per_epoch: int | None) -> Any:
    """Replace each length in epochs in a value."""
    if isinstance(value, Mapping):
        return {key: _resolve(f"{where}.{key}", item, iters_per_epoch) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_resolve(f"{where}[{i}]", item, iters_per_epoch) for i, item in enumerate(value))
    match = _EPOCHS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    if iters_per_epoch is None:
        raise not_accepted(where, value, "iterations, since an epoch of these data has no length")
    return Epochs(float(match[1])).to_iters(iters_per_epoch)
