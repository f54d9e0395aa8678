"""Any step of a past run again, from its checkpoints."""

from trainkit.replay.report import Replay
from trainkit.replay.session import replay

__all__ = ["Replay", "replay"]
