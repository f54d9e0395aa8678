"""What this project brings to trainkit."""

import argparse
from collections.abc import Callable
from typing import Any

from trainkit.config import CfgNode
from trainkit.utils.errors import not_accepted

NAMES = {
    "Replay": "trainkit.projects.replay.inspection",
    "RunRecord": "trainkit.projects.replay.record",
    "SkipBatches": "trainkit.projects.replay.skip",
    "replay": "trainkit.projects.replay.step",
    "replay_range": "trainkit.projects.replay.search",
}
LENDS = {"trainkit.projects.replay": ["Replay", "replay", "replay_range"]}
RUN_HOOKS = ["RunRecord"]
OPTIONS = ["--fork"]


def add_config(cfg: CfgNode) -> None:
    # The run starts with the state of another run; --fork sets these keys.
    cfg.FORK = CfgNode()
    # The folder with the checkpoints of the other run. "": no fork.
    cfg.FORK.RUN = ""
    # The iteration of the checkpoint.
    cfg.FORK.ITER = -1
    # [key, value in the other run, value in this run], written by --fork.
    cfg.FORK.CHANGES = []
    # [[100, 120]]: leave out the batches of iterations 100 to 119, counted from 0.
    cfg.DATALOADER.SKIP = []
    # The only mode: later batches move up.
    cfg.DATALOADER.SKIP_MODE = "shift"


def check(cfg: CfgNode) -> None:
    from trainkit.projects.replay.skip import RANGES, are_ranges

    pairs = cfg.DATALOADER.SKIP
    mode = cfg.DATALOADER.SKIP_MODE
    if pairs and not are_ranges(pairs):
        raise not_accepted("DATALOADER.SKIP", pairs, RANGES)
    if cfg.FORK.ITER >= 0 and not cfg.FORK.RUN:
        raise not_accepted("FORK.ITER", cfg.FORK.ITER, "an iteration of FORK.RUN, which is empty")
    if pairs and mode != "shift":
        raise not_accepted("DATALOADER.SKIP_MODE", mode, "'shift'")


def prepare(cfg: CfgNode) -> None:
    entry = {"NAME": "SkipBatches", "RANGES": cfg.DATALOADER.SKIP}
    if entry["RANGES"] and entry not in cfg.HOOKS:  # in the config of a trainer it is already
        cfg.HOOKS = [*cfg.HOOKS, entry]


def add_options(parser: argparse.ArgumentParser) -> None:
    text = (
        "start from another run after so many iterations (default: its newest checkpoint), "
        "with its settings"
    )
    parser.add_argument("--fork", default="", metavar="RUN[@ITERATIONS]", help=text)


def apply_options(cfg: Any, args: argparse.Namespace) -> Callable[[], None]:
    from trainkit.projects.replay.fork import apply

    return apply(cfg, args)
