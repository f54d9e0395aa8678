"""Lengths and periods: iterations (``500``) or epochs (``"3ep"``)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from fvcore.common.config import CfgNode

from trainkit.utils.errors import not_accepted
from trainkit.utils.periods import exact, whole_or_rounded

LENGTH_KEYS = frozenset(
    {
        *("SOLVER.MAX_ITER", "SOLVER.STEPS", "SOLVER.WARMUP_ITERS", "SOLVER.CHECKPOINT_PERIOD"),
        *("CHECKPOINT.START", "TEST.EVAL_PERIOD", "TEST.EVAL_START", "LOG.PERIOD", "VIS_PERIOD"),
        "EARLY_STOPPING.START",
    }
)
"""Keys of a config that take iterations or epochs; SOLVER.STEPS takes a list of them."""
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
    """Read one length, the value of ``key``. Raises ConfigError if it is neither an int nor a text such as "3ep"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    match = _EPOCHS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise not_accepted(
            key, value, 'iterations (an int, such as 500) or epochs (such as "3ep" or "0.5ep")'
        )
    return Epochs(float(match[1]))


def resolve_lengths(cfg: _Cfg, iters_per_epoch: int | None) -> _Cfg:
    """A copy of ``cfg`` with all lengths in iterations; it is frozen if ``cfg`` is.

    Args:
        iters_per_epoch: iterations per pass over the training data; None if the data has no length: a length in epochs
            is then a ConfigError.
    """

    def resolve(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: resolve(f"{key}.{name}", item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(resolve(f"{key}[{i}]", item) for i, item in enumerate(value))
        if not isinstance(value, str) or not _EPOCHS.fullmatch(value):
            return value
        if iters_per_epoch is None:
            raise not_accepted(key, value, "iterations, since an epoch of these data has no length")
        return Epochs(float(value[:-2])).to_iters(iters_per_epoch)

    resolved = cfg.clone()
    for key in [
        *sorted(LENGTH_KEYS),
        "HOOKS",
        "SOLVER.SCHEDULES",
    ]:  # in entries, every text such as "3ep" is a length
        *parents, name = key.split(".")
        node = resolved[parents[0]] if parents else resolved
        if name in node:  # a project may declare it
            node[name] = resolve(key, node[name])  # by item, which works for a frozen node too
    return resolved
