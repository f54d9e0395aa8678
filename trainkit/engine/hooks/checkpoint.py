"""Hooks that save the model: periodically, and at the best value of a metric."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint import PeriodicCheckpointer as _PeriodicCheckpointer
from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT, HookBase
from trainkit.engine.hooks.monitor import MetricHook, Mode
from trainkit.utils.periods import is_last, next_due, say_done

logger = logging.getLogger(__name__)

_Save: TypeAlias = Callable[[], Future[None] | None]


class _Saves(HookBase):
    """A hook that saves, and knows whether its last saves have failed."""

    checkpointer: Any
    _writing: Sequence[Future[None]] = ()  # asynchronous saves
    _failure = ""

    def _request(self, name: str, save: _Save) -> None:
        self.trainer.request_save(name, partial(self._save, save))

    def _save(self, save: _Save) -> None:
        try:
            writing = save()
        except CheckpointError as error:
            self._failure = str(error)
            raise  # the trainer logs it
        if isinstance(writing, Future):  # an overridden save may return anything else
            self._writing = (*self._writing, writing)

    def _settle(self) -> str:
        """Wait for the files of this rank, never for other ranks; returns the error of a failed save, or ""."""
        writing, self._writing = self._writing, ()
        for error in filter(None, [future.exception() for future in writing]):
            self._failure = str(error)
        return self._failure

    def _check_saved(self) -> None:
        """Raise on every rank if one rank has failed, so that no other rank waits for it."""
        if failures := [*filter(None, self.trainer.gather(self._settle()))]:
            raise CheckpointError("; ".join(failures))


@HOOK_REGISTRY.register()
class PeriodicCheckpointer(_PeriodicCheckpointer, _Saves):
    """`trainkit.checkpoint.PeriodicCheckpointer` as a hook; the trainer gives the length of the run.

    A stopped run is saved too. If a save fails (a full disk), the error is logged and the run continues; if it is the
    last save, the run fails on every rank.
    """

    priority = SAVE_POINT
    ends = True
    config_keys = (
        *(("period", "SOLVER.CHECKPOINT_PERIOD"), ("max_to_keep", "CHECKPOINT.MAX_TO_KEEP")),
        *(("start", "CHECKPOINT.START"), ("save_last", "CHECKPOINT.SAVE_LAST")),
    )
    _state_names = ("_final_iter",)

    _final_iter = -1  # number of iterations done when the final file was written

    def before_train(self) -> None:
        self.max_iter = self.trainer.max_iter
        # a larger number is from another run
        self._final_iter = self._final_iter if self._final_iter <= self.trainer.start_iter else -1
        self._saved: tuple[int, int] | None = None  # the position of the run at its last save
        self._writing, self._failure = (), ""

    def after_step(self) -> None:
        iteration = self.trainer.iter
        if name := self.name_at(iteration):
            if is_last(self.trainer):
                self._final_iter = iteration + 1
            self._request(name, partial(self.step, iteration))

    def next_due(self, done: int) -> int:
        return next_due(self.trainer, done, self.period, offset=self.start)

    def after_train(self) -> None:
        status, iteration = self.trainer.status, self.trainer.last_done_iter
        if status == "finished" and self.save_last and self._final_iter != iteration + 1:
            self._final_iter, name = iteration + 1, f"{self.file_prefix}_final"
            self._request(name, partial(self.save_and_rotate, name, iteration))
        elif status == "stopped" and iteration >= 0 and not self._is_saved():
            name = f"{self.file_prefix}_{iteration:07d}"
            self._request(name, partial(self.save_and_rotate, name, iteration))
        if status == "failed":
            self._settle()
        else:
            self._check_saved()

    def _save(self, save: _Save) -> None:
        self._saved, self._writing, self._failure = self.trainer.position, (), ""  # only the last save counts
        super()._save(save)

    def _is_saved(self) -> bool:
        """Whether the current position is saved. Every rank calls it: only the rank that writes knows of a failure."""
        return all(self.trainer.gather(not self._settle() and self._saved == self.trainer.position))


@HOOK_REGISTRY.register()
class BestCheckpointer(MetricHook, _Saves):
    """Save ``<file_prefix>`` when an evaluation gives the best value of ``val_metric`` so far.

    This does not move ``last_checkpoint``. A value counts as the best only if its file was written. The entry
    ``best_of`` of the file names the metric; a hook with ``evaluated_models`` makes these the ``model`` of the file.
    The checkpointer is trainkit's or fvcore's. For other arguments see `MetricHook`.
    """

    priority = SAVE_POINT + 3
    config_keys = (*MetricHook.config_keys, ("mode", "CHECKPOINT.BEST_MODE"))
    min_period = 0

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
        super().__init__(eval_period, val_metric, mode, offset=offset)
        self.checkpointer, self.file_prefix = checkpointer, file_prefix
        self._before: dict[str, Any] = {}  # the state before the last saves, which may still fail

    def before_train(self) -> None:
        """Raises ConfigError if another hook writes the same file."""
        if [getattr(hook, "file_prefix", "") for hook in self.trainer.hooks].count(self.file_prefix) > 1:
            raise ConfigError(f"two hooks have the file_prefix {self.file_prefix!r}; give them different ones")
        super().before_train()

    def after_train(self) -> None:
        if self.trainer.status == "finished":
            self.act_now()
        self.state_dict()  # waits for the files
        if self.trainer.status == "finished":
            self._check_saved()

    def act_now(self) -> None:
        self._before, self._failure = self.state_dict(), ""
        super().act_now()

    def judge(self, value: float) -> list[str]:
        """The names of the files to write."""
        return [self.file_prefix] if self.not_better == 0 else []

    def act(self, decision: list[str]) -> None:
        if self.best is not None and self.file_prefix in decision:  # on rank 0
            logger.info("%s is %.5g, the best so far", self.monitored_metric, self.best)
        for name in decision:
            self._request(name, partial(self._save_untagged, name, self.trainer.last_done_iter))

    def _save_untagged(self, name: str, iteration: int, **entries: Any) -> Future[None] | None:
        if isinstance(self.checkpointer, Checkpointer):
            entries |= {"iteration": iteration, "best_of": self.monitored_metric}
            return self.checkpointer.save(name, tag_last=False, **entries)
        # fvcore's checkpointer always moves last_checkpoint
        tag = Path(self.checkpointer.save_dir) / "last_checkpoint"
        before = tag.read_text() if tag.exists() else None
        self.checkpointer.save(name, iteration=iteration)
        if self.checkpointer.save_to_disk:
            tag.unlink(missing_ok=True) if before is None else self.checkpointer.tag_last_checkpoint(before)
        return None

    def summary(self) -> str:
        if self.best is None or self.best_iter is None:
            return ""
        done = min(self.best_iter + 1, self.trainer.max_iter)  # in the final evaluation best_iter is max_iter
        return f"best {self.monitored_metric} {self.best:.5g} {say_done(done)}: {self.file_prefix}.pth"

    def state_dict(self) -> dict[str, Any]:
        """Wait for the files; if one was not written, the state is the one before its save."""
        if self._settle() and self._before:
            before, self._before = self._before, {}
            self.load_state_dict(before)
        return super().state_dict()


def best_file_prefixes(metrics: str | Sequence[str] | None) -> dict[str, str]:
    """metric -> ``file_prefix`` of its `BestCheckpointer`: ``model_best``; of several metrics ``model_best_<metric>``.

    Raises:
        ConfigError: two metrics of CHECKPOINT.BEST_METRIC would use the same file.
    """
    names = [metrics] if isinstance(metrics, str) and metrics else list(metrics or ())
    if len(names) == 1:
        return {names[0]: "model_best"}
    prefixes = {name: f"model_best_{name.replace('/', '_')}" for name in names}
    if len({*prefixes.values()}) < len(names):
        raise ConfigError(f"CHECKPOINT.BEST_METRIC {names} has two metrics for one file; leave one out")
    return prefixes
