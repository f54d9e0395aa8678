"""What this project brings to trainkit."""

from trainkit.config import CfgNode

NAMES = {"FrozenWeights": "trainkit.projects.trainable_only.frozen"}


def add_config(cfg: CfgNode) -> None:
    # True: checkpoints leave out frozen parameters, which MODEL.WEIGHTS has.
    cfg.CHECKPOINT.TRAINABLE_ONLY = False


def prepare(cfg: CfgNode) -> None:
    if not cfg.CHECKPOINT.TRAINABLE_ONLY:
        return
    names = [entry.get("NAME") for entry in cfg.HOOKS]
    if "FrozenWeights" in names:
        return
    hook = {"NAME": "FrozenWeights"}
    cfg.HOOKS = [*cfg.HOOKS, hook]
