"""What this project brings to trainkit."""

import argparse
from typing import Any

from trainkit.config import CfgNode, ConfigError
from trainkit.config.checks import check_accepted, check_conflicts

NAMES = {
    "CombinedLoader": "trainkit.projects.samplers.combined",
    "GroupedBatchSampler": "trainkit.projects.samplers.combined",
    "RandomSubsetTrainingSampler": "trainkit.projects.samplers.parts",
    "RepeatFactorTrainingSampler": "trainkit.projects.samplers.parts",
    "limited_sampler": "trainkit.projects.samplers.parts",
}
LENDS = {
    "trainkit.data": [
        "CombinedLoader",
        "GroupedBatchSampler",
        "RandomSubsetTrainingSampler",
        "RepeatFactorTrainingSampler",
    ],
    "trainkit.data.samplers": [
        "GroupedBatchSampler",
        "RandomSubsetTrainingSampler",
        "RepeatFactorTrainingSampler",
    ],
}
OPTIONS = ["--overfit-batches"]

_OVERFIT, _LIMIT = "DATALOADER.OVERFIT_BATCHES", "SOLVER.MAX_BATCHES_PER_EPOCH"
# the ranges of the keys that one sampler has
_RANGES = {
    "RandomSubsetTrainingSampler": {"(0, 1]": "DATALOADER.RANDOM_SUBSET_RATIO"},
    "RepeatFactorTrainingSampler": {"[0, inf)": "DATALOADER.REPEAT_THRESHOLD"},
}


def add_config(cfg: CfgNode) -> None:
    # RandomSubsetTrainingSampler: the fraction of the dataset that is used.
    cfg.DATALOADER.RANDOM_SUBSET_RATIO = 1.0
    # RepeatFactorTrainingSampler: repeat categories rarer than this fraction.
    cfg.DATALOADER.REPEAT_THRESHOLD = 0.0
    # RepeatFactorTrainingSampler: the square root of threshold / frequency.
    cfg.DATALOADER.REPEAT_SQRT = True
    # N: repeat the data of the first N iterations. 0: use all data.
    cfg.DATALOADER.OVERFIT_BATCHES = 0
    # An epoch ends after this many iterations. 0: after all data.
    cfg.SOLVER.MAX_BATCHES_PER_EPOCH = 0


def check(cfg: CfgNode) -> None:
    """Raises ConfigError if a number is out of range, or two keys exclude each other."""
    check_accepted(cfg, {"[0, inf)": f"{_OVERFIT} {_LIMIT}"})
    for name in (cfg.DATALOADER.SAMPLER_TRAIN, cfg.DATALOADER.get("LIMITED")):
        check_accepted(cfg, _RANGES.get(name, {}))
    check_conflicts(cfg, [(_OVERFIT, _LIMIT, "both say how many batches an epoch has")])


def prepare(cfg: CfgNode) -> None:
    """Put the sampler for limited epochs around the sampler of the config."""
    limits = cfg.DATALOADER.OVERFIT_BATCHES or cfg.SOLVER.MAX_BATCHES_PER_EPOCH
    if limits and cfg.DATALOADER.SAMPLER_TRAIN != "limited_sampler":
        cfg.DATALOADER["LIMITED"] = cfg.DATALOADER.SAMPLER_TRAIN
        cfg.DATALOADER.SAMPLER_TRAIN = "limited_sampler"


def add_options(parser: argparse.ArgumentParser) -> None:
    text = (
        "train on the same N batches again and again, to see whether the model can learn "
        "them; evaluate N batches"
    )
    parser.add_argument("--overfit-batches", type=int, default=0, metavar="N", help=text)


def apply_options(cfg: Any, args: argparse.Namespace) -> None:
    """Set the keys in place, by item, since the config may be frozen. Raises ConfigError for a LazyConfig."""
    if not isinstance(cfg, CfgNode):
        raise ConfigError(
            "--overfit-batches is given, but the job has a LazyConfig; limit dataloader.train "
            "instead"
        )
    cfg.DATALOADER["OVERFIT_BATCHES"] = cfg.TEST["MAX_BATCHES"] = args.overfit_batches
