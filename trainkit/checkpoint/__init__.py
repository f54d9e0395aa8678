"""Checkpoints: written completely or not at all, verified when loaded, and rotated."""

from trainkit.checkpoint.atomic import CheckpointError
from trainkit.checkpoint.checkpointer import Checkpointer
from trainkit.checkpoint.file import load_trusted_pickle
from trainkit.checkpoint.periodic import PeriodicCheckpointer

__all__ = ["Checkpointer", "PeriodicCheckpointer", "CheckpointError", "load_trusted_pickle"]
