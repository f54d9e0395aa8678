"""The config key of this project."""

from trainkit.projects.loggers.progress_bar import can_show_bars

from trainkit.config import CfgNode


def add_config(cfg: CfgNode) -> None:
    # True: in a terminal or notebook, show a progress bar instead of the lines of "console".
    cfg.LOG.PROGRESS = False


def prepare(cfg: CfgNode) -> None:
    if cfg.LOG.PROGRESS and can_show_bars():
        cfg.LOG.WRITERS = [
            "progress_bar" if name == "console" else name for name in cfg.LOG.WRITERS
        ]
