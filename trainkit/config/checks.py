"""Checks that every config must pass: one table of the values that keys accept."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

from trainkit.config.config import CfgNode, get_key, projects_of
from trainkit.config.defaults import CHOICES, RANGES, get_cfg
from trainkit.config.lengths import LENGTH_KEYS, parse_length
from trainkit.utils.errors import ConfigError, not_accepted
from trainkit.utils.periods import is_number

# (setting, other setting, reason): they exclude each other; a key without "=" means: if it is on
_CONFLICTS: tuple[tuple[str, str, str], ...] = (
    ("DETERMINISTIC", "CUDNN_BENCHMARK", "the benchmark chooses kernels by their speed"),
    ("MODEL.DDP.STATIC_GRAPH", "MODEL.DDP.FIND_UNUSED_PARAMETERS", "a static graph finds unused parameters itself"),
)


def check_values(cfg: Any) -> None:
    """Raises ConfigError for numbers out of range, unknown choices and contradictory settings."""
    if not isinstance(cfg, CfgNode):
        raise ConfigError(f"cfg is a {type(cfg).__module__}.{type(cfg).__name__}; use trainkit's get_cfg")
    check_ranges(cfg, RANGES)
    check_choices(cfg, CHOICES)
    check_conflicts(cfg, _CONFLICTS)
    warmup, length = cfg.SOLVER.WARMUP_ITERS, cfg.SOLVER.MAX_ITER
    is_used = warmup != get_cfg().SOLVER.WARMUP_ITERS and not get_key(cfg, "SOLVER.SCHEDULES")
    if is_used and isinstance(warmup, int) and isinstance(length, int) and warmup > length:
        raise not_accepted("SOLVER.WARMUP_ITERS", warmup, f"at most SOLVER.MAX_ITER, {length}")
    for key, folder in ("OUTPUT_DIR", cfg.OUTPUT_DIR), ("CHECKPOINT.DIR", cfg.CHECKPOINT.DIR or "."):
        if not isinstance(folder, str) or not folder.strip() or re.search(r"\0|^\w+:/(?!/)", folder):
            raise not_accepted(key, folder, 'a folder, or an address such as "s3://bucket/run"')
    if len({*cfg.LOG.WRITERS}) < len(cfg.LOG.WRITERS):
        raise not_accepted("LOG.WRITERS", cfg.LOG.WRITERS, "each name once")
    scale = cfg.SOLVER.AMP.LOSS_SCALE
    if scale != "dynamic" and not _is_in(scale, "(0, inf)"):
        raise not_accepted("SOLVER.AMP.LOSS_SCALE", scale, '"dynamic", or a number in (0, inf)')
    for entry in cfg.TEST.EXPECTED_RESULTS:
        if not isinstance(entry, list | tuple) or len(entry) != 4:
            raise not_accepted("TEST.EXPECTED_RESULTS", entry, "entries [task, metric, value, tolerance]")
    for project in projects_of(cfg):
        getattr(project, "check", lambda _: None)(cfg)


def check_ranges(cfg: CfgNode, ranges: Mapping[str, str]) -> None:
    """Raises ConfigError if a value, or an item of a list, is not in its interval.

    Args:
        ranges: interval, such as ``"[0, inf)"`` -> keys. A key whose default is an int takes whole numbers, and if it
            is one of ``LENGTH_KEYS``, also epochs. A key whose default is None takes None.
    """
    defaults = get_cfg()
    for interval, key in ((interval, key) for interval, keys in ranges.items() for key in keys.split()):
        value: Any = reduce(getattr, key.split("."), cfg)
        default: Any = reduce(getattr, key.split("."), defaults)
        is_whole_key = isinstance(default, int) or key in LENGTH_KEYS
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, str) and key in LENGTH_KEYS:
                parse_length(item, key)
            elif item is None is default:
                continue
            elif not _is_in(item, interval) or (is_whole_key and not isinstance(item, int)):
                raise not_accepted(key, value, f"a {'whole ' * is_whole_key}number in {interval}")


def _is_in(value: object, interval: str) -> bool:
    """NaN is in no interval."""
    low, high = map(float, interval[1:-1].split(", "))
    is_end = (value == low and interval[0] == "(") or (value == high and interval[-1] == ")")
    return is_number(value) and low <= value <= high and not is_end


def check_choices(cfg: CfgNode, choices: Mapping[str, Iterable[Any]]) -> None:
    """Raises ConfigError if a value is not one of its choices."""
    for key, accepted in choices.items():
        value = reduce(getattr, key.split("."), cfg)
        if value not in accepted:
            raise not_accepted(key, value, ", ".join(map(repr, accepted)))


def check_conflicts(cfg: CfgNode, conflicts: Iterable[tuple[str, str, str]]) -> None:
    """Raises ConfigError if two settings are on that exclude each other.

    Args:
        conflicts: (key, other key, reason); ``KEY=value`` means this value, ``KEY`` alone that it is on.
    """

    def is_on(setting: str) -> bool:
        key, _, wanted = setting.partition("=")
        return get_key(cfg, key) == wanted if wanted else bool(get_key(cfg, key))

    for one, other, reason in conflicts:
        if is_on(one) and is_on(other):
            raise ConfigError(f"{one} and {other} exclude each other: {reason}; set one of them")


def similar_keys(node: CfgNode, default: CfgNode, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, similar key) for each key of ``node`` that is not in ``default``, but looks like a key there."""
    for name, value in node.items():
        if isinstance(value, CfgNode) and isinstance(default.get(name), CfgNode):
            yield from similar_keys(value, default[name], f"{prefix}{name}.")
        elif not hasattr(default, name):  # not "in": a project may declare the key
            for known in difflib.get_close_matches(name.upper(), default, n=1, cutoff=0.8):
                yield prefix + name, prefix + known
