"""The config key of this project."""

from trainkit.config import CfgNode
from trainkit.config.checks import check_choices


def add_config(cfg: CfgNode) -> None:
    """Add the key with its default."""
    cfg.REQUEUE_SIGNAL = ""  # "SIGUSR1", "SIGTERM": a SLURM job that this signal stops is requeued. "": it only stops.


def check(cfg: CfgNode) -> None:
    """Raises ConfigError if the signal is not one of these."""
    check_choices(cfg, {"REQUEUE_SIGNAL": ("", "SIGUSR1", "SIGTERM")})


def prepare(cfg: CfgNode) -> None:
    """Put the hook into HOOKS."""
    hook = {"NAME": "Requeue", "SIGNAL": cfg.REQUEUE_SIGNAL}
    if cfg.REQUEUE_SIGNAL and hook not in cfg.HOOKS:
        cfg.HOOKS = [*cfg.HOOKS, hook]
