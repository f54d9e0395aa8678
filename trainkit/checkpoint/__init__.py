"""Checkpoints: written completely or not at all, verified when loaded, and rotated."""

from trainkit.checkpoint.checkpointer import Checkpointer
from trainkit.checkpoint.errors import CheckpointError
from trainkit.checkpoint.format import FORMAT_REGISTRY, CheckpointFormat
from trainkit.checkpoint.periodic import PeriodicCheckpointer
from trainkit.utils.plugins import lending

__all__ = [
    "FORMAT_REGISTRY",
    "CheckpointError",
    "CheckpointFormat",
    "Checkpointer",
    "PeriodicCheckpointer",
]

__getattr__, __dir__ = lending(__name__)
