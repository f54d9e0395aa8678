"""Further writers: CSV, a progress bar, TensorBoard, and Weights & Biases."""

from trainkit.projects.loggers.csv_writer import CSVWriter
from trainkit.projects.loggers.progress_bar import ProgressBar
from trainkit.projects.loggers.wandb_writer import WandbWriter

__all__ = ["CSVWriter", "ProgressBar", "WandbWriter"]
