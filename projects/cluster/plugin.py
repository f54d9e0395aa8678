"""What this project brings to trainkit."""

from trainkit.config import CfgNode
from trainkit.config.checks import check_accepted

NAMES = {
    "Requeue": "trainkit.projects.cluster.hooks",
    "StepTimeout": "trainkit.projects.cluster.hooks",
}


def add_config(cfg: CfgNode) -> None:
    # In the first step, ranks wait this many seconds for each other. 0: 30 minutes.
    cfg.FIRST_STEP_TIMEOUT = 0.0
    # From the second step on, ranks wait this many seconds for each other. 0: 30 minutes.
    cfg.STEP_TIMEOUT = 0.0
    # "SIGUSR1", "SIGTERM": a SLURM job that this signal stops is requeued. "": it only stops.
    cfg.REQUEUE_SIGNAL = ""


def check(cfg: CfgNode) -> None:
    check_accepted(
        cfg,
        {
            "[0, inf)": "FIRST_STEP_TIMEOUT STEP_TIMEOUT",
            ("", "SIGUSR1", "SIGTERM"): "REQUEUE_SIGNAL",
        },
    )


def prepare(cfg: CfgNode) -> None:
    requeue = {"NAME": "Requeue", "SIGNAL": cfg.REQUEUE_SIGNAL}
    timeout = {"NAME": "StepTimeout", "SECONDS": cfg.STEP_TIMEOUT, "FIRST": cfg.FIRST_STEP_TIMEOUT}
    for hook, is_on in (
        (requeue, cfg.REQUEUE_SIGNAL),
        (timeout, cfg.STEP_TIMEOUT or cfg.FIRST_STEP_TIMEOUT),
    ):
        if is_on and hook not in cfg.HOOKS:
            cfg.HOOKS = [*cfg.HOOKS, hook]
