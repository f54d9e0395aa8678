"""Repeat any step of a past run; start a run from a checkpoint of another one; leave out batches."""

from typing import TYPE_CHECKING

from trainkit.utils.loading import names_on_demand

if TYPE_CHECKING:
    from trainkit.projects.replay.inspection import Replay
    from trainkit.projects.replay.search import replay_range
    from trainkit.projects.replay.step import replay

__all__ = ["Replay", "replay", "replay_range"]

__getattr__ = names_on_demand(__name__)
