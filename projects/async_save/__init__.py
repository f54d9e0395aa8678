"""Checkpoints that a thread writes while training continues."""

from trainkit.utils.plugins import lending

__getattr__, __dir__ = lending(__name__)
