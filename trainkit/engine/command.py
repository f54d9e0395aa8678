"""What a command asks for, noted in the config that it sets up, so that no option is ignored."""

from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from trainkit.config import CfgNode

_NOTE = "__command__"  # in the __dict__ of a config, beside the marks of yacs: copies of it have it, files do not

RUN_DOES_IT = "call trainkit.engine.run(args, Trainer, cfg), which follows all options"


class Command(NamedTuple):
    """The options of a script that `DefaultTrainer` has to know."""

    resume: bool | None = None  # None: the script has no such option
    eval_only: bool = False


def note_command(cfg: CfgNode, args: Any) -> None:
    """Remember the options with which a script sets up ``cfg``."""
    cfg.__dict__[_NOTE] = Command(getattr(args, "resume", None), getattr(args, "eval_only", False))


def command_of(cfg: CfgNode) -> Command:
    """What `note_command` has noted in ``cfg`` or in the config of which it is a copy."""
    return cfg.__dict__.get(_NOTE, Command())


class Replay(Protocol):
    """Takes the place of a run that a script sets up; see `trainkit.replay`. ``origin`` is that of the run.

    ``seed`` is the one that the run has drawn, if it is done again from its beginning.
    """

    origin: dict[str, Any]
    seed: int | None

    def set_up(self, cfg: Any) -> None:
        """Change the config before anything is made from it or written; called again for a config made from it."""

    def train(self, trainer: Any) -> None:
        """Called instead of the training; does not return."""


active_replay: ContextVar[Replay | None] = ContextVar("active_replay", default=None)
