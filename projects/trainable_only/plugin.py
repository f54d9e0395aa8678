"""What this project brings to trainkit."""

from trainkit.config import CfgNode

NAMES = {"FrozenWeights": "trainkit.projects.trainable_only.frozen"}


def add_config(cfg: CfgNode) -> None:
    # True: checkpoints leave out frozen parameters, which MODEL.WEIGHTS has.
    cfg.CHECKPOINT.TRAINABLE_ONLY = False


def prepare(cfg: CfgNode) -> None:
    names = [entry.get("NAME") for entry in cfg.HOOKS]
    if cfg.CHECKPOINT.TRAINABLE_ONLY and "FrozenWeights" not in names:
        cfg.HOOKS = [*cfg.HOOKS, {"NAME": "FrozenWeights"}]
