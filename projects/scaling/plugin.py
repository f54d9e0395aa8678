"""What this project brings to trainkit."""

from trainkit.config import CfgNode
from trainkit.config.checks import check_accepted, check_conflicts

NAMES = {
    "scale_lr_to_batch": "trainkit.projects.scaling.scaling",
    "scale_workers": "trainkit.projects.scaling.scaling",
}
LENDS = {"trainkit.config": ["scale_lr_to_batch", "scale_workers"]}

_BATCH, _WORLD = "SOLVER.REFERENCE_BATCH_SIZE", "SOLVER.REFERENCE_WORLD_SIZE"


def add_config(cfg: CfgNode) -> None:
    # The number of ranks this config is for; it is scaled for others. 0: not.
    cfg.SOLVER.REFERENCE_WORLD_SIZE = 0
    # BASE_LR is for this many samples per iteration, and is scaled. 0: not scaled.
    cfg.SOLVER.REFERENCE_BATCH_SIZE = 0


def check(cfg: CfgNode) -> None:
    check_accepted(cfg, {"[0, inf)": f"{_BATCH} {_WORLD}"})
    check_conflicts(cfg, [(_BATCH, _WORLD, "both scale SOLVER.BASE_LR")])


def prepare(cfg: CfgNode) -> None:
    from trainkit.projects.scaling.scaling import scale_lr_to_batch

    cfg.update(scale_lr_to_batch(cfg))


def scale(cfg: CfgNode, num_ranks: int) -> CfgNode:
    from trainkit.projects.scaling.scaling import scale_workers

    return scale_workers(cfg, num_ranks)
