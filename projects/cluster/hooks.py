"""Requeue a job of SLURM, and shorter timeouts of the process group."""

import atexit
import logging
import os
import signal
import subprocess
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.utils import comm
from trainkit.utils.periods import check_number

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class Requeue(HookBase):
    """If a signal stops the run, ask SLURM to start its job again; rank 0 does it when its process ends.

    ``signal`` is its name, such as "SIGUSR1". The trainer must handle it, as it does SIGUSR1 in a SLURM job.
    """

    def __init__(self, signal: str) -> None:
        if signal not in ("SIGUSR1", "SIGTERM"):
            raise ValueError(f'signal must be "SIGUSR1" or "SIGTERM", got {signal!r}')
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
        subprocess.run(
            ["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.error(
            "The SLURM job %s is not requeued: %s",
            job,
            str(getattr(error, "stderr", "") or error).strip(),
        )
    else:
        logger.info("The SLURM job %s is requeued; it will continue from the last checkpoint", job)


@HOOK_REGISTRY.register()
class StepTimeout(HookBase):
    """Ranks wait at most ``first`` seconds for each other in the first step, then ``seconds``. 0: 30 minutes."""

    def __init__(self, seconds: float, first: float = 0.0) -> None:
        check_number("seconds", seconds, "[0, inf)")
        check_number("first", first, "[0, inf)")
        self._seconds, self._first = seconds or 1800.0, first or 1800.0

    def before_train(self) -> None:
        self._is_first = True
        text = "Ranks wait %g s for each other in the first step, then %g s; GPUs then write their exchanges to %s*"
        logger.info(text, self._first, self._seconds, trace_files())
        _set_timeout(self._first)

    def after_step(self) -> None:
        if self._is_first:
            _set_timeout(self._seconds)
        self._is_first = False


def _set_timeout(seconds: float) -> None:
    if dist.is_initialized():
        dist.group.WORLD.set_timeout(timedelta(seconds=seconds))  # type: ignore[union-attr]


def trace_files() -> str:
    """Where torch's flight recorder, which is on for NCCL, writes when a rank waits too long; the rank follows."""
    default = f"{os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')}/torch/comm_lib_trace_rank_"
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get(
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", default
    )
