"""Checkpoints that a thread writes while training continues."""

from trainkit.projects.async_save.format import AsyncFormat, StagedFormat

__all__ = ["AsyncFormat", "StagedFormat"]
