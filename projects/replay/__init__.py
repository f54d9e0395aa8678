"""Repeat any step of a past run; start a run from a checkpoint of another one; leave out batches."""

from trainkit.utils.plugins import lending

__all__ = ["Replay", "replay", "replay_range"]

# imported when asked for: this takes up to two seconds, and every DefaultTrainer imports the package
__getattr__, __dir__ = lending(__name__)
