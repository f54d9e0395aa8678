"""Checkpoints: written completely or not at all, verified when loaded, and rotated."""

from typing import Any

from trainkit.checkpoint.atomic import CheckpointError
from trainkit.checkpoint.checkpointer import Checkpointer
from trainkit.checkpoint.format import FORMAT_REGISTRY, CheckpointFormat
from trainkit.checkpoint.periodic import PeriodicCheckpointer
from trainkit.utils.plugins import lent_names, lent_object

__all__ = [
    "FORMAT_REGISTRY",
    "CheckpointError",
    "CheckpointFormat",
    "Checkpointer",
    "PeriodicCheckpointer",
]


def __getattr__(name: str) -> Any:
    return lent_object(__name__, name)


def __dir__() -> list[str]:
    return [*globals(), *lent_names(__name__)]
