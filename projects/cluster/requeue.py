"""Requeue a job of SLURM."""

import atexit
import logging
import os
import signal
import subprocess
from types import FrameType

from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.utils import comm

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class Requeue(HookBase):
    """If a signal stops the run, ask SLURM to start its job again; rank 0 does it when its process ends.

    Args:
        signal: its name, such as "SIGUSR1". The trainer must handle it, as it does SIGUSR1 in a SLURM job.
    """

    def __init__(self, signal: str) -> None:
        self._signal = signal

    def before_train(self) -> None:
        self._has_come = False
        signum = signal.Signals[self._signal]
        stop = signal.getsignal(signum)

        def note(signum: int, frame: FrameType | None) -> None:
            self._has_come = True
            stop(signum, frame)  # type: ignore[operator, misc]

        if callable(stop) and comm.is_main_process():
            signal.signal(signum, note)  # the trainer restores the handler that it has found itself

    def after_train(self) -> None:
        job = os.environ.get("SLURM_JOB_ID")
        if job is not None and self._has_come and self.trainer.status == "stopped":
            atexit.register(requeue, job)  # then everything is on the disk


def requeue(job: str) -> None:
    """Ask SLURM to stop the job ``job`` and to start it again; log an error if it does not."""
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        logger.error("The SLURM job %s is not requeued: %s", job, str(getattr(error, "stderr", "") or error).strip())
    else:
        logger.info("The SLURM job %s is requeued; it will continue from the last checkpoint", job)
