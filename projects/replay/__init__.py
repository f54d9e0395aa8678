"""Repeat any step of a past run; start a run from a checkpoint of another one; leave out batches."""

from typing import Any

from trainkit.utils.plugins import lent_names, lent_object

__all__ = ["Replay", "replay", "replay_range"]


def __getattr__(name: str) -> Any:
    # imported when asked for: this takes up to two seconds, and every DefaultTrainer imports the package
    return lent_object(__name__, name)


def __dir__() -> list[str]:
    return [*globals(), *lent_names(__name__)]
