"""The config key of this project."""

from trainkit.projects.scaling.scaling import scale_lr_to_batch

from trainkit.config import CfgNode
from trainkit.config.checks import check_conflicts, check_ranges

_KEY = "SOLVER.REFERENCE_BATCH_SIZE"


def add_config(cfg: CfgNode) -> None:
    """Add the key with its default."""
    cfg.SOLVER.REFERENCE_BATCH_SIZE = 0  # BASE_LR is for this many samples per iteration, and is scaled. 0: not scaled.


def check(cfg: CfgNode) -> None:
    """Raises ConfigError if the value is not accepted."""
    check_ranges(cfg, {"[0, inf)": _KEY})
    check_conflicts(cfg, [(_KEY, "SOLVER.REFERENCE_WORLD_SIZE", "both scale SOLVER.BASE_LR")])


def prepare(cfg: CfgNode) -> None:
    """Scale the learning rates."""
    cfg.update(scale_lr_to_batch(cfg))
