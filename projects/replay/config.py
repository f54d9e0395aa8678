"""The config keys of this project."""

from typing import Any

from trainkit.config import CfgNode
from trainkit.utils.errors import not_accepted
from trainkit.utils.periods import is_whole


def add_config(cfg: CfgNode) -> None:
    """Add the keys with their defaults."""
    cfg.FORK = CfgNode()  # The run starts with the state of another run; --fork sets these keys.
    cfg.FORK.RUN = ""  # The folder with the checkpoints of the other run. "": no fork.
    cfg.FORK.ITER = -1  # The iteration of the checkpoint.
    cfg.FORK.CHANGES = []  # [key, value in the other run, value in this run], written by --fork.
    cfg.DATALOADER.SKIP = []  # [[100, 120]]: leave out the batches of iterations 100 to 119, counted from 0.
    cfg.DATALOADER.SKIP_MODE = "shift"  # The only mode: later batches move up.


def check(cfg: CfgNode) -> None:
    """Raises ConfigError if a value is not accepted."""
    pairs, mode = cfg.DATALOADER.get("SKIP", []), cfg.DATALOADER.get("SKIP_MODE", "shift")
    is_pair = [isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs]
    numbers: list[Any] = [number for pair in pairs for number in pair] if all(is_pair) else [None]
    if not all(is_whole(number, 0) for number in numbers) or numbers != sorted({*numbers}):
        raise not_accepted("DATALOADER.SKIP", pairs, "a list of [start, end], whole numbers from 0 on, which grow")
    if "FORK" in cfg and cfg.FORK.ITER >= 0 and not cfg.FORK.RUN:
        raise not_accepted("FORK.ITER", cfg.FORK.ITER, "an iteration of FORK.RUN, which is empty")
    if mode != "shift":
        raise not_accepted("DATALOADER.SKIP_MODE", mode, "'shift'")


def prepare(cfg: CfgNode) -> None:
    """Add the hook that leaves out batches."""
    if ranges := cfg.DATALOADER.get("SKIP"):
        cfg.HOOKS = [*cfg.HOOKS, {"NAME": "SkipBatches", "RANGES": ranges}]
