"""What this project brings to trainkit."""

from trainkit.config import CfgNode

NAMES = {
    "CSVWriter": "trainkit.projects.loggers.csv_writer",
    "csv": "trainkit.projects.loggers.csv_writer",
    "ProgressBar": "trainkit.projects.loggers.progress_bar",
    "progress_bar": "trainkit.projects.loggers.progress_bar",
    "MLflowWriter": "trainkit.projects.loggers.services",
    "WandbWriter": "trainkit.projects.loggers.services",
    "mlflow": "trainkit.projects.loggers.services",
    "wandb": "trainkit.projects.loggers.services",
    "TensorboardXWriter": "trainkit.projects.loggers.tensorboard_writer",
    "tensorboard": "trainkit.projects.loggers.tensorboard_writer",
}
LENDS = {
    "trainkit.utils.events": [
        "CSVWriter",
        "MLflowWriter",
        "ProgressBar",
        "TensorboardXWriter",
        "WandbWriter",
    ]
}


def add_config(cfg: CfgNode) -> None:
    # True: in a terminal or notebook, show a progress bar instead of the lines of "console".
    cfg.LOG.PROGRESS = False


def prepare(cfg: CfgNode) -> None:
    from trainkit.projects.loggers.progress_bar import can_show_bars

    if cfg.LOG.PROGRESS and can_show_bars():
        cfg.LOG.WRITERS = [
            "progress_bar" if name == "console" else name for name in cfg.LOG.WRITERS
        ]
