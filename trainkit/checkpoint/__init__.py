"""Checkpoints: written completely or not at all, verified when loaded, and rotated."""

from trainkit.checkpoint.atomic import CheckpointError
from trainkit.checkpoint.checkpointer import Checkpointer
from trainkit.checkpoint.format import FORMAT_REGISTRY, CheckpointFormat
from trainkit.checkpoint.periodic import PeriodicCheckpointer
from trainkit.utils.loading import names_on_demand

_OF_PROJECTS = ("CheckpointStore", "STORE_REGISTRY", "load_trusted_pickle")
__all__ = [
    "FORMAT_REGISTRY",
    "CheckpointError",
    "CheckpointFormat",
    "Checkpointer",
    "PeriodicCheckpointer",
]
__all__ += _OF_PROJECTS

__getattr__ = names_on_demand(__name__, *_OF_PROJECTS)
