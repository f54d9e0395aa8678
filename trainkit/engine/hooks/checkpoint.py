"""When the model is saved."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint import PeriodicCheckpointer as _PeriodicCheckpointer
from trainkit.checkpoint.periodic import check_file_prefix
from trainkit.config import ConfigError
from trainkit.engine.hook_base import SAVE_POINT, HookBase
from trainkit.engine.hooks.monitor import MetricMonitor, Mode
from trainkit.engine.hooks.registry import HOOK_REGISTRY
from trainkit.engine.periods import check_period, is_due, is_last
from trainkit.utils import comm

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PeriodicCheckpointer(_PeriodicCheckpointer, HookBase):
    """`trainkit.checkpoint.PeriodicCheckpointer` as a hook; the run's length is the trainer's.

    A run that is stopped is saved as ``<file_prefix>_<iteration>`` where it stands, whatever the period.

    A save that fails (a full disk) is logged, and the run goes on from the checkpoints that it has; if the last one of
    a run fails, the run has failed, on every rank.
    """

    priority = SAVE_POINT

    _final_iter = -1  # how many iterations the run had when its final file was written

    def before_train(self) -> None:
        self.max_iter = self.trainer.max_iter
        # else it is of another run
        self._final_iter = self._final_iter if self._final_iter <= self.trainer.start_iter else -1
        self._saved: tuple[int, int] | None = None  # the position of the run at its last save
        self._writing: Future[None] | None = None
        self._failure = ""
        if self.trainer.start_iter > 0:
            self.rotate(self.trainer.start_iter - 1)

    def after_step(self) -> None:
        if getattr(self.checkpointer, "async_save", False):
            _log_failed_save(self.checkpointer)
        iteration = self.trainer.iter
        name = self.name_at(iteration)
        if name is not None:
            if is_last(self.trainer):
                self._final_iter = iteration + 1
            self._request(name, partial(self.step, iteration), iteration)

    def after_train(self) -> None:
        self._finish_saving()
        iteration = self.trainer.iter - 1
        if self.trainer.status == "finished" and self._final_iter != self.trainer.iter and self.save_last:
            self._final_iter = self.trainer.iter
            name = f"{self.file_prefix}_final"
            self._request(name, partial(self.save, name, iteration=iteration), iteration)
        elif self.trainer.status == "stopped" and iteration >= 0 and not self._is_saved():
            name = f"{self.file_prefix}_{iteration:07d}"
            self._request(name, partial(self._save_and_rotate, name, iteration), iteration)
        self._finish_saving()
        if self.trainer.status != "failed":
            _raise_first(self.trainer.gather(self._failure))

    def _is_saved(self) -> bool:
        """Whether there is a checkpoint of where the run stands; only the rank that writes knows of a failure."""
        return all(self.trainer.gather(not self._failure and self._saved == self.trainer.position))

    def _request(self, name: str, save: Callable[[], Future[None] | None], iteration: int) -> None:
        self.trainer.request_save(name, partial(self._try_to_save, save, iteration))

    def _try_to_save(self, save: Callable[[], Future[None] | None], iteration: int) -> None:
        self._saved, self._failure = self.trainer.position, ""
        try:
            self._writing = save()
        except CheckpointError as error:
            self._failure = str(error)
            logger.error("The checkpoint of iteration %d is not saved, training goes on: %s", iteration, error)

    def _finish_saving(self) -> None:
        """Wait for what this rank writes, never for others."""
        if self._writing is not None:
            self._failure = _failure_of(self._writing)
            self._writing = None
        _log_failed_save(self.checkpointer, wait=True)

    def state_dict(self) -> dict[str, Any]:
        """``final_iter``: how many iterations the run had when its final file was written."""
        return {"final_iter": self._final_iter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._final_iter = state_dict["final_iter"]


@HOOK_REGISTRY.register()
class BestCheckpointer(HookBase):
    """Save ``<file_prefix>`` whenever an evaluation gave the best value of ``val_metric`` so far.

    It stands behind the `EvalHook` and has its ``eval_period`` and ``offset``. ``--resume`` goes on from the newest
    checkpoint, not from the best one: this save does not move ``last_checkpoint``. All ranks follow rank 0, which has
    the metrics.

    Args:
        checkpointer: ours or fvcore's.
        mode: whether "max" or "min" is better; "auto": see `trainkit.engine.hooks.monitor.infer_mode`.
    """

    priority = SAVE_POINT + 1

    def __init__(
        self,
        eval_period: int,
        checkpointer: Any,
        val_metric: str,
        mode: Mode = "max",
        file_prefix: str = "model_best",
        *,
        offset: int = 0,
    ) -> None:
        self._period = check_period("eval_period", eval_period)
        self._offset = check_period("offset", offset)
        self.checkpointer = checkpointer
        self._monitor = MetricMonitor(val_metric, mode)
        check_file_prefix(file_prefix)
        self.file_prefix = file_prefix
        self._unwritten: tuple[Future[None], dict[str, Any]] | None = None  # and the best value before
        self._failure = ""

    @property
    def monitored_metric(self) -> str:
        """The evaluation result that it needs."""
        return self._monitor.metric

    def before_train(self) -> None:
        """
        Raises:
            ValueError: another hook writes the same file.
        """
        for hook in self.trainer.hooks:
            if isinstance(hook, BestCheckpointer) and hook is not self and hook.file_prefix == self.file_prefix:
                raise ConfigError(
                    f"BestCheckpointer of {hook.monitored_metric} and of {self.monitored_metric} both write "
                    f"{self.file_prefix!r}; give them different file_prefix (or name both in CHECKPOINT.BEST_METRIC)"
                )
        self._monitor.begin(self.trainer.start_iter)

    def after_step(self) -> None:
        _log_failed_save(self.checkpointer)
        if is_due(self.trainer, self._period, offset=self._offset) and not is_last(self.trainer):
            self._save_if_best(self.trainer.iter)

    def after_train(self) -> None:
        self._finish_saving()
        self._failure = ""
        if self.trainer.status == "finished":
            self._save_if_best(self.trainer.iter - 1)
        self._finish_saving()
        if self.trainer.status == "finished":
            _raise_first(self.trainer.gather(self._failure))

    def summary(self) -> str:
        """The best value and where it was; "" before there is one."""
        if self._monitor.best is None:
            return ""
        where = f"in iteration {self._monitor.best_iter}: {self.file_prefix}.pth"
        return f"best {self._monitor.metric} {self._monitor.best:.5g} {where}"

    def _save_if_best(self, iteration: int) -> None:
        self._finish_saving()
        before = self._monitor.state_dict()
        better = comm.is_main_process() and self._monitor.update(self.trainer.storage)
        if not comm.broadcast(bool(better)):
            return
        if comm.is_main_process():
            logger.info("%s is %.5g, the best so far", self._monitor.metric, self._monitor.best)
        self.trainer.request_save(self.file_prefix, partial(self._try_to_save, iteration, before))

    def _try_to_save(self, iteration: int, before: dict[str, Any]) -> None:
        try:
            writing = self._save(iteration)
        except CheckpointError as error:
            self._fail(str(error), before)
        else:
            self._unwritten = None if writing is None else (writing, before)

    def _fail(self, failure: str, before: dict[str, Any]) -> None:
        """The best file is still the one before."""
        self._monitor.load_state_dict(before)
        self._failure = failure
        logger.error("The best checkpoint so far is not saved, training goes on: %s", failure)

    def _finish_saving(self) -> None:
        """Wait for the best file that this rank writes."""
        if self._unwritten is not None:
            (writing, before), self._unwritten = self._unwritten, None
            if failure := _failure_of(writing):
                self._fail(failure, before)
        _log_failed_save(self.checkpointer)

    def _save(self, iteration: int) -> Future[None] | None:
        if isinstance(self.checkpointer, Checkpointer):
            return self.checkpointer.save(self.file_prefix, tag_last=False, iteration=iteration)
        self._save_and_restore_tag(iteration)
        return None

    def _save_and_restore_tag(self, iteration: int) -> None:
        """A checkpointer that cannot save without tagging gets its tag back."""
        tag = Path(self.checkpointer.save_dir) / "last_checkpoint"
        before = tag.read_text() if tag.exists() else None
        self.checkpointer.save(self.file_prefix, iteration=iteration)
        if self.checkpointer.save_to_disk:
            if before is None:
                tag.unlink(missing_ok=True)
            else:
                self.checkpointer.tag_last_checkpoint(before)

    def state_dict(self) -> dict[str, Any]:
        self._finish_saving()
        return self._monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._monitor.load_state_dict(state_dict)


def _log_failed_save(checkpointer: Any, *, wait: bool = False) -> None:
    """Log the error of an asynchronous save, which is raised once for all hooks that share the checkpointer."""
    if isinstance(checkpointer, Checkpointer):
        try:
            checkpointer.wait() if wait else checkpointer.raise_error()
        except CheckpointError as error:
            logger.error("A checkpoint is not saved, training goes on: %s", error)


def _failure_of(writing: Future[None]) -> str:
    """Wait for a save; why it has failed, or nothing."""
    try:
        writing.result()
    except CheckpointError as error:
        return str(error)
    return ""


def _raise_first(failures: Iterable[str]) -> None:
    """Raise a CheckpointError on every rank if one has a failure: none is left waiting for a rank that has raised."""
    if failed := list(filter(None, failures)):
        raise CheckpointError("; ".join(failed))


def best_file_prefixes(metrics: str | Sequence[str] | None) -> dict[str, str]:
    """metric -> ``file_prefix`` of its `BestCheckpointer`, for CHECKPOINT.BEST_METRIC.

    That is ``model_best`` for one metric, and ``model_best_<metric>`` for several, with ``_`` instead of ``/``.

    Raises:
        ConfigError: two metrics have the same file.
    """
    names = [metrics] if metrics and isinstance(metrics, str) else list(metrics or ())
    if len(names) == 1:
        return {names[0]: "model_best"}
    prefixes = [f"model_best_{name.replace('/', '_')}" for name in names]
    for prefix in prefixes:
        if prefixes.count(prefix) > 1:
            raise ConfigError(
                f"CHECKPOINT.BEST_METRIC {names} has two metrics for the file {prefix}.pth; leave one out"
            )
    return dict(zip(names, prefixes, strict=True))
