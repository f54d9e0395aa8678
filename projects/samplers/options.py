"""``--overfit-batches N``: train on the same batches again and again."""

import argparse
from typing import Any

from trainkit.config import CfgNode, ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    text = "train on the same N batches again and again, to see whether the model can learn them; evaluate N batches"
    parser.add_argument("--overfit-batches", type=int, default=0, metavar="N", help=text)


def apply(cfg: Any, args: argparse.Namespace) -> None:
    """Set the keys in place, by item, since the config may be frozen. Raises ConfigError for a LazyConfig."""
    if not isinstance(cfg, CfgNode):
        raise ConfigError("--overfit-batches is given, but the job has a LazyConfig; limit dataloader.train instead")
    cfg.DATALOADER["OVERFIT_BATCHES"] = cfg.TEST["MAX_BATCHES"] = args.overfit_batches
