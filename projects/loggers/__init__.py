"""Writers for services that compare runs."""

from trainkit.projects.loggers.mlflow_writer import MLflowWriter
from trainkit.projects.loggers.wandb_writer import WandbWriter

__all__ = ["MLflowWriter", "WandbWriter"]
