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
from trainkit.engine.launch import DEFAULT_TIMEOUT
from trainkit.utils import comm
from trainkit.utils.periods import check_number

logger = logging.getLogger(__name__)

ANSWER_SEC = 10.0  # ranks may notice a failure one after the other


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
        reason = getattr(error, "stderr", "") or error
        logger.error("The SLURM job %s is not requeued: %s", job, str(reason).strip())
    else:
        logger.info("The SLURM job %s is requeued; it will continue from the last checkpoint", job)


@HOOK_REGISTRY.register()
class StepTimeout(HookBase):
    """Ranks wait at most ``first`` seconds for each other in the first step, then ``seconds``.

    0: 30 minutes, the default of `launch`, which is in force again after the run. If an exchange over Gloo fails, the
    log names the ranks that hang.
    """

    def __init__(self, seconds: float, first: float = 0.0) -> None:
        check_number("seconds", seconds, "[0, inf)")
        check_number("first", first, "[0, inf)")
        usual_sec = DEFAULT_TIMEOUT.total_seconds()
        self._seconds = seconds or usual_sec
        self._first = first or usual_sec

    def before_train(self) -> None:
        self._is_first = True
        text = (
            "Ranks wait %g s for each other in the first step, then %g s; "
            "GPUs then write their exchanges to %s*"
        )
        logger.info(text, self._first, self._seconds, trace_files())
        _set_timeout(self._first)

    def after_step(self) -> None:
        if self._is_first:
            _set_timeout(self._seconds)
        self._is_first = False

    def after_failure(self, error: BaseException) -> None:
        """If an exchange has failed, name the ranks for which the others waited in vain."""
        if comm.get_world_size() > 1 and _is_of_exchange(error):
            missing = _missing_ranks()
            if missing:
                logger.error("Ranks that hang or have ended: %s", missing)

    def after_train(self) -> None:
        _set_timeout(DEFAULT_TIMEOUT.total_seconds())


def _is_of_exchange(error: BaseException) -> bool:
    """Whether another rank did not answer, or has ended; Gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _missing_ranks() -> list[int]:
    """The ranks that do not call this too within `ANSWER_SEC`; asked over the store, which a rank that hangs serves."""
    store = dist.PrefixStore("after a failure", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    keys = [f"rank {rank}" for rank in range(comm.get_world_size())]
    store.set(keys[comm.get_rank()], "")
    try:
        store.wait(keys, timedelta(seconds=ANSWER_SEC))
    except dist.DistError:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def _set_timeout(seconds: float) -> None:
    if dist.is_initialized():
        dist.group.WORLD.set_timeout(timedelta(seconds=seconds))  # type: ignore[union-attr]


def trace_files() -> str:
    """Where torch's flight recorder, which is on for NCCL, writes when a rank waits too long; the rank follows."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    default = f"{cache}/torch/comm_lib_trace_rank_"
    old_name = os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", default)
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or old_name
