"""What a script must not ignore: the options of its command line, and a replay that takes over its training."""

from contextvars import ContextVar
from typing import Any, NamedTuple

from trainkit.config import CfgNode

_NOTE = "__command__"  # in the __dict__ of a config, like yacs's marks: copied with the config, not written to files

RUN_DOES_IT = "call trainkit.engine.run(args, Trainer, cfg), which follows all options"


class Command(NamedTuple):
    """The options of a script that `DefaultTrainer` checks."""

    resume: bool | None = None  # None: the script has no such option
    eval_only: bool = False


def note_command(cfg: CfgNode, args: Any) -> None:
    """Note the options of a script in its ``cfg``."""
    cfg.__dict__[_NOTE] = Command(getattr(args, "resume", None), getattr(args, "eval_only", False))


def command_of(cfg: CfgNode) -> Command:
    """The noted options of ``cfg``, or of the config from which it was copied."""
    return cfg.__dict__.get(_NOTE, Command())


active_replay: ContextVar[Any] = ContextVar("active_replay", default=None)
"""A `trainkit.replay.session.Session`: ``set_up`` changes configs before they are used, ``train`` does not return."""
