"""Log lines that do not repeat, small tables, and a config for programs that do not pass theirs on."""

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch
from tabulate import tabulate

from trainkit.config import CfgNode

_counts: Counter[Hashable] = Counter()
_last_times: dict[Hashable, float] = {}


def log_first_n(
    lvl: int,
    msg: str,
    n: int = 1,
    *,
    name: str | None = None,
    key: str | Collection[str] = "caller",
) -> None:
    """Log only the first ``n`` times.

    ``name``: the name of the logger; default is the calling module. ``key``: calls are counted together if they have
    the same calling line ("caller"), the same "message", or both.
    """
    module, line = _caller()
    keys = [key] if isinstance(key, str) else key
    counted: list[Hashable] = []
    if "caller" in keys:
        counted.append(line)
    if "message" in keys:
        counted.append(msg)
    if _count("first", *counted) <= n:
        logging.getLogger(name or module).log(lvl, msg, stacklevel=2)


def log_every_n(lvl: int, msg: str, n: int = 1, *, name: str | None = None) -> None:
    """Log the first of every ``n`` calls from the same line."""
    module, line = _caller()
    num_before = _count("every", line) - 1
    if num_before % n == 0:
        logging.getLogger(name or module).log(lvl, msg, stacklevel=2)


def log_every_n_seconds(lvl: int, msg: str, n: float = 1, *, name: str | None = None) -> None:
    """Log unless the same line has logged less than ``n`` seconds ago."""
    module, line = _caller()
    now = time.monotonic()
    if now - _last_times.get(line, -math.inf) >= n:
        _last_times[line] = now
        logging.getLogger(name or module).log(lvl, msg, stacklevel=2)


def create_small_table(small_dict: Mapping[str, Any]) -> str:
    """A table of one row with the keys as header, for a few values."""
    return tabulate(
        [list(small_dict.values())],
        headers=list(small_dict),
        tablefmt="pipe",
        floatfmt=".3f",
        stralign="center",
        numalign="center",
    )


def _log_api_usage(identifier: str) -> None:
    torch._C._log_api_usage_once(f"trainkit.{identifier}")


def _count(*key: Hashable) -> int:
    _counts[key] += 1
    return _counts[key]


def _caller() -> tuple[str, tuple[str, int]]:
    """(module name, (file, line)) of the code that has called this module."""
    frame = sys._getframe(2)
    module = frame.f_globals.get("__name__", "__main__")
    return module, (frame.f_code.co_filename, frame.f_lineno)


global_cfg = CfgNode()
"""Empty until `set_global_cfg`."""


def set_global_cfg(cfg: CfgNode) -> None:
    """Replace the content of ``global_cfg`` by the keys of ``cfg``."""
    global_cfg.clear()
    global_cfg.update(cfg)
