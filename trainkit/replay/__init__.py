"""Any step of a past run again, from its checkpoints."""

from trainkit.replay.report import Replay
from trainkit.replay.step import replay

__all__ = ["Replay", "replay"]
