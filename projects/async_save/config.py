"""The config key of this project."""

from trainkit.config import CfgNode, choose


def add_config(cfg: CfgNode) -> None:
    # True: copy the state to host memory, and write it in a thread meanwhile.
    cfg.CHECKPOINT.ASYNC = False


def prepare(cfg: CfgNode) -> None:
    if cfg.CHECKPOINT.ASYNC:
        choose(cfg, "CHECKPOINT.FORMAT", "async_save", "CHECKPOINT.ASYNC")
