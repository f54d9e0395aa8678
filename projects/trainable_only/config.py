"""The config key of this project."""

from trainkit.config import CfgNode


def add_config(cfg: CfgNode) -> None:
    # True: checkpoints leave out frozen parameters, which MODEL.WEIGHTS has.
    cfg.CHECKPOINT.TRAINABLE_ONLY = False


def prepare(cfg: CfgNode) -> None:
    if cfg.CHECKPOINT.TRAINABLE_ONLY and all(
        entry.get("NAME") != "FrozenWeights" for entry in cfg.HOOKS
    ):
        cfg.HOOKS = [*cfg.HOOKS, {"NAME": "FrozenWeights"}]
