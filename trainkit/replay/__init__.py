"""Repeat any step of a past run, from its checkpoints or from a capsule."""

from trainkit.replay.hindsight import replay_range
from trainkit.replay.result import Replay
from trainkit.replay.step import replay

__all__ = ["Replay", "replay", "replay_range"]
