"""What this project brings to trainkit."""

from trainkit.config import CfgNode, choose
from trainkit.config.checks import check_conflicts

NAMES = {
    "GraphAMPTrainer": "trainkit.projects.graph.trainer",
    "GraphTrainer": "trainkit.projects.graph.trainer",
    "graph_trainer": "trainkit.projects.graph.trainer",
}
LENDS = {
    "trainkit.engine": ["GraphAMPTrainer", "GraphTrainer"],
    "trainkit.projects.graph": ["GraphAMPTrainer", "GraphTrainer"],
}

_CONFLICTS = (
    (
        "MODEL.COMPILE.ENABLED",
        "SOLVER.GRAPH.ENABLED",
        "take the graph where the device waits for the host",
    ),
    (
        "MODEL.ACTIVATION_CHECKPOINT.BLOCKS",
        "SOLVER.GRAPH.ENABLED",
        "a graph cannot look at the random state",
    ),
    ("MODEL.PARALLEL=fsdp", "SOLVER.GRAPH.ENABLED", "a graph cannot gather parameters"),
    (
        "SOLVER.LOGICAL_RANKS",
        "SOLVER.GRAPH.ENABLED",
        "a graph draws no random numbers of a logical rank",
    ),
)


def add_config(cfg: CfgNode) -> None:
    cfg.SOLVER.GRAPH = CfgNode()
    # True: record the step as a CUDA graph; without CUDA nothing changes.
    cfg.SOLVER.GRAPH.ENABLED = False


def check(cfg: CfgNode) -> None:
    check_conflicts(cfg, _CONFLICTS)


def prepare(cfg: CfgNode) -> None:
    if cfg.SOLVER.GRAPH.ENABLED:
        choose(cfg, "SOLVER.TRAINER", "graph_trainer", "SOLVER.GRAPH.ENABLED")
