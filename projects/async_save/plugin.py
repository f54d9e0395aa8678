"""What this project brings to trainkit."""

from trainkit.config import CfgNode, choose

NAMES = {
    "AsyncFormat": "trainkit.projects.async_save.format",
    "StagedFormat": "trainkit.projects.async_save.format",
    "async_save": "trainkit.projects.async_save.format",
    "staged": "trainkit.projects.async_save.format",
}
LENDS = {"trainkit.projects.async_save": ["AsyncFormat", "StagedFormat"]}


def add_config(cfg: CfgNode) -> None:
    # True: copy the state to host memory, and write it in a thread meanwhile.
    cfg.CHECKPOINT.ASYNC = False


def prepare(cfg: CfgNode) -> None:
    if cfg.CHECKPOINT.ASYNC:
        choose(cfg, "CHECKPOINT.FORMAT", "async_save", "CHECKPOINT.ASYNC")
