"""Further writers: CSV, a progress bar, the settings in TensorBoard, and services that compare runs."""

from trainkit.projects.loggers.csv_writer import CSVWriter
from trainkit.projects.loggers.mlflow_writer import MLflowWriter
from trainkit.projects.loggers.progress_bar import ProgressBar
from trainkit.projects.loggers.wandb_writer import WandbWriter

__all__ = ["CSVWriter", "MLflowWriter", "ProgressBar", "WandbWriter"]
