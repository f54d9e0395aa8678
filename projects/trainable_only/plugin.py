"""What this project brings to trainkit."""

from trainkit.config import CfgNode

NAMES = {"FrozenWeights": "trainkit.projects.trainable_only.frozen"}


def add_config(cfg: CfgNode) -> None:
    # True: checkpoints leave out frozen parameters, which MODEL.WEIGHTS has.
    cfg.CHECKPOINT.TRAINABLE_ONLY = False


def prepare(cfg: CfgNode) -> None:
    if cfg.CHECKPOINT.TRAINABLE_ONLY and all(
        entry.get("NAME") != "FrozenWeights" for entry in cfg.HOOKS
    ):
        cfg.HOOKS = [*cfg.HOOKS, {"NAME": "FrozenWeights"}]
