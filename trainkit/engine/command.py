"""Note the options of a command line in the config, so that `DefaultTrainer` ignores none."""

from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

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


class Replay(Protocol):
    """Replaces the training in a script; see `trainkit.replay`.

    Attributes:
        origin: how the run was started.
        seed: the seed that the run used, if the replay starts at iteration 0; else None.
    """

    origin: dict[str, Any]
    seed: int | None

    def set_up(self, cfg: Any) -> None:
        """Change the config before it is used or written; called again for a config derived from it."""

    def train(self, trainer: Any) -> None:
        """Called instead of training; does not return."""


active_replay: ContextVar[Replay | None] = ContextVar("active_replay", default=None)
