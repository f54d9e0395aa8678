"""Repeat any step of a past run; start a run from a checkpoint of another one; leave out batches."""

from typing import Any

from trainkit.utils.loading import load_plugin

__all__ = ["Replay", "replay", "replay_range"]

_MODULES = {
    "Replay": "trainkit.projects.replay.inspection",
    "replay": "trainkit.projects.replay.step",
    "replay_range": "trainkit.projects.replay.search",
}


def __getattr__(name: str) -> Any:
    # imported when asked for: this takes up to two seconds, and every DefaultTrainer imports the package
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(load_plugin(_MODULES[name]), name)
