"""The config keys of this project."""

from trainkit.config import CfgNode
from trainkit.config.checks import check_choices, check_conflicts, check_ranges


def add_config(cfg: CfgNode) -> None:
    """Add the keys with their defaults."""
    cfg.CHECKPOINT.PUBLISH = ""  # "model" or "ema": at the end, write files of only these weights (final and best).
    cfg.CHECKPOINT.PUBLISH_FORMAT = "pth"  # The format of these files: "pth", or "safetensors" (needs that package).
    cfg.TEST.PRECISE_BN = CfgNode()
    cfg.TEST.PRECISE_BN.ENABLED = False  # True: compute the statistics of batch norm layers before each evaluation.
    cfg.TEST.PRECISE_BN.NUM_ITER = 200  # The number of batches for these statistics.


def check(cfg: CfgNode) -> None:
    """Raises ConfigError if a value is wrong."""
    publish = {"CHECKPOINT.PUBLISH": ("", "model", "ema"), "CHECKPOINT.PUBLISH_FORMAT": ("pth", "safetensors")}
    check_choices(cfg, publish)
    check_ranges(cfg, {"[1, inf)": "TEST.PRECISE_BN.NUM_ITER"})
    reason = "its statistics depend on the number of processes"
    check_conflicts(cfg, [("SOLVER.LOGICAL_RANKS", "TEST.PRECISE_BN.ENABLED", reason)])


def prepare(cfg: CfgNode) -> None:
    """Put the hooks that the keys switch on into HOOKS."""
    names = [entry.get("NAME") for entry in cfg.HOOKS if isinstance(entry, dict)]
    if cfg.TEST.PRECISE_BN.ENABLED and "PreciseBN" not in names:
        cfg.HOOKS = [*cfg.HOOKS, {"NAME": "PreciseBN"}]
    if cfg.CHECKPOINT.PUBLISH and "PublishWeights" not in names:
        cfg.HOOKS = [{"NAME": "PublishWeights"}, *cfg.HOOKS]
