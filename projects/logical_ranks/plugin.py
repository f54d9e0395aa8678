"""What this project brings to trainkit."""

from typing import Any

from trainkit.config import CfgNode, choose
from trainkit.config.checks import check_conflicts
from trainkit.utils import comm
from trainkit.utils.errors import not_accepted

NAMES = {
    "LogicalAMPTrainer": "trainkit.projects.logical_ranks.trainer",
    "LogicalTrainer": "trainkit.projects.logical_ranks.trainer",
    "logical_trainer": "trainkit.projects.logical_ranks.trainer",
}

_CONFLICTS = (
    ("SOLVER.LOGICAL_RANKS", "MODEL.PARALLEL=fsdp", "shards are summed in an order of their own"),
    (
        "SOLVER.LOGICAL_RANKS",
        "SOLVER.ACCUMULATION_FACTORS",
        "the number of micro-batches is that of the tree",
    ),
    (
        "SOLVER.LOGICAL_RANKS",
        "MODEL.DDP.COMPRESSION",
        "it rounds what processes exchange, and one process does not",
    ),
    (
        "SOLVER.LOGICAL_RANKS",
        "MODEL.DDP.FIND_UNUSED_PARAMETERS",
        "each batch has to use the same parameters",
    ),
    (
        "SOLVER.LOGICAL_RANKS",
        "MODEL.DDP.BROADCAST_BUFFERS",
        "all processes have the same buffers already",
    ),
)


def add_config(cfg: CfgNode) -> None:
    # The same bits on 1, 2, 4, ... processes, up to this power of two. 0: off.
    cfg.SOLVER.LOGICAL_RANKS = 0


def check(cfg: CfgNode) -> None:
    """Raises ConfigError if the processes cannot share the logical ranks, or another setting excludes them."""
    check_conflicts(cfg, _CONFLICTS)
    num = cfg.SOLVER.LOGICAL_RANKS
    world_size = comm.get_world_size()
    is_power_of_two = num & (num - 1) == 0  # so is 0
    if num < 0 or not is_power_of_two or num % world_size != 0:
        accepted = f"0, or a power of two that is a multiple of {world_size} processes"
        raise not_accepted("SOLVER.LOGICAL_RANKS", num, accepted)


def prepare(cfg: CfgNode) -> None:
    """A batch has a part for each logical rank; a process computes those that `own_ranks` names."""
    num = cfg.SOLVER.LOGICAL_RANKS
    if num:
        comm.set_data_ranks(comm.get_rank(), num)
        # a process adds up its gradients itself
        cfg.MODEL.DDP.GRADIENT_AS_BUCKET_VIEW = False
        choose(cfg, "SOLVER.TRAINER", "logical_trainer", "SOLVER.LOGICAL_RANKS")


def wrap_loader(cfg: CfgNode, loader: Any) -> Any:
    """A loader of the logical ranks of this process."""
    from trainkit.projects.logical_ranks.loader import divide

    num = cfg.SOLVER.LOGICAL_RANKS
    if not num:
        return loader
    return divide(loader, num, cfg.SOLVER.ACCUMULATION_STEPS)
