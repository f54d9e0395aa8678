"""Checkpoints: written completely or not at all, verified when loaded, and rotated."""

from typing import TYPE_CHECKING

from trainkit.utils.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit.checkpoint.atomic import CheckpointError
    from trainkit.checkpoint.checkpointer import Checkpointer
    from trainkit.checkpoint.file import load_trusted_pickle
    from trainkit.checkpoint.format import FORMAT_REGISTRY, CheckpointFormat
    from trainkit.checkpoint.periodic import PeriodicCheckpointer
    from trainkit.checkpoint.store import STORE_REGISTRY, CheckpointStore

__all__ = [
    "Checkpointer",
    "PeriodicCheckpointer",
    "CheckpointError",
    "CheckpointFormat",
    "CheckpointStore",
    "FORMAT_REGISTRY",
    "STORE_REGISTRY",
    "load_trusted_pickle",
]

__getattr__ = lazy_names(__name__)
