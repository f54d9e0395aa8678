"""What a command asks for, noted in the config that it sets up, so that no option is ignored."""

from typing import Any, NamedTuple

from trainkit.config import CfgNode, ConfigError
from trainkit.utils import comm

# in the __dict__ of a config, beside the marks of yacs: copies of the config have them, files do not
_NOTE, _TRIAL = "__command__", "__trial__"

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


def note_trial(cfg: CfgNode) -> None:
    """Remember that ``cfg`` is the config of a trial run."""
    cfg.__dict__[_TRIAL] = True


def check_command(cfg: CfgNode, args: Any) -> None:
    """
    Raises:
        ConfigError: the script has not done what ``--fast-dev-run`` or ``--num-gpus`` asks for.
    """
    if getattr(args, "fast_dev_run", False) and _TRIAL not in cfg.__dict__:
        raise ConfigError(
            "--fast-dev-run is given, but the config is that of the whole run; "
            f"{RUN_DOES_IT}, or call default_setup with fast_dev_config(cfg)"
        )
    if (num_gpus := getattr(args, "num_gpus", 1)) > comm.get_world_size():
        raise ConfigError(
            f"--num-gpus is {num_gpus}, but the number of processes is {comm.get_world_size()}; "
            "start them by trainkit.engine.launch, or leave --num-gpus out"
        )
