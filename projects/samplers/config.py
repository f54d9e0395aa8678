"""The config keys of this project."""

from trainkit.config import CfgNode
from trainkit.config.checks import check_ranges


def add_config(cfg: CfgNode) -> None:
    """Add the keys with their defaults."""
    cfg.DATALOADER.RANDOM_SUBSET_RATIO = 1.0  # RandomSubsetTrainingSampler: the fraction of the dataset that is used.
    cfg.DATALOADER.REPEAT_THRESHOLD = 0.0  # RepeatFactorTrainingSampler: repeat categories rarer than this fraction.
    cfg.DATALOADER.REPEAT_SQRT = True  # RepeatFactorTrainingSampler: the square root of threshold / frequency.


def check(cfg: CfgNode) -> None:
    """Raises ConfigError if a number is out of range."""
    check_ranges(cfg, {"(0, 1]": "DATALOADER.RANDOM_SUBSET_RATIO", "[0, inf)": "DATALOADER.REPEAT_THRESHOLD"})
