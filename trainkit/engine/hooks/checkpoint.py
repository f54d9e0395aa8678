"""Hooks that save the model: periodically, and at the best value of a metric."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.periodic import PeriodicSaves
from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT, HookBase
from trainkit.engine.hooks.monitor import MetricHook, Mode
from trainkit.utils import comm
from trainkit.utils.errors import ConfigError
from trainkit.utils.periods import check_period, is_last, parse_time, say_done

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PeriodicCheckpointer(PeriodicSaves, HookBase):
    """`PeriodicSaves` as a hook.

    The trainer gives the length of the run. A stopped run is saved too. If a save fails (a full
    disk), the error is logged and the run continues; if it is the last save, the run fails on every
    rank.

    ``period`` may also be a time, such as ``30min``. It counts from the start of ``train()`` and
    from each save. With several ranks the clock of rank 0 counts, and a save comes at most
    ``trainer.stop_check_period`` iterations later. ``start`` is then 0.
    """

    priority = SAVE_POINT
    ends = True
    config_keys = (
        ("period", "SOLVER.CHECKPOINT_PERIOD"),
        ("max_to_keep", "CHECKPOINT.MAX_TO_KEEP"),
        ("start", "CHECKPOINT.START"),
        ("save_last", "CHECKPOINT.SAVE_LAST"),
    )
    _state_names = ("_final_iter", "former_finals")

    def __init__(
        self,
        checkpointer: Any,
        period: int | str,
        max_iter: int | None = None,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
        *,
        start: int = 0,
        save_last: bool = True,
    ) -> None:
        # number of updates done when the final file was written, -1 without it; the name is that
        # of its entry in checkpoints
        self._final_iter = -1
        self._saved: tuple[int, int] | None = None  # the `_position` at the last save
        self._writing: Any = None  # what the last save has returned; a future, if it goes on
        self._failure = ""  # the error of the last save
        self._clock: _SaveClock | None = None
        if isinstance(period, str):
            self._clock = _SaveClock(parse_time(period, "period"))
            period = 0
            if start != 0:
                raise ValueError(
                    f"start must be 0 if the period is a time, got {start!r}; give the period in "
                    "iterations or epochs"
                )
        super().__init__(
            checkpointer,
            period,
            max_iter,
            max_to_keep,
            file_prefix,
            start=start,
            save_last=save_last,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for iteration in state_dict["former_finals"]:
            check_period("former_finals", iteration)
        check_period("final_iter", state_dict["final_iter"], minimum=-1)
        super().load_state_dict(state_dict)

    def before_train(self) -> None:
        self.max_iter = self.trainer.max_iter
        if self._final_iter > self.trainer.start_iter:  # from another run
            self._final_iter = -1
        resumed_from = getattr(self.checkpointer, "resumed_from", "")
        if resumed_from not in ("", f"{self.file_prefix}_final.pth"):
            self._final_iter = -1  # the final file is damaged, or was given up
        self._saved = None
        self._writing = None
        self._failure = ""
        starts_at_final = self._final_iter == self.trainer.start_iter > 0
        if starts_at_final and self.max_iter > self._final_iter and not self.trainer.ends_early:
            self._keep_former_final()
        if self._clock is not None:
            self._clock.start(self.trainer)

    def _keep_former_final(self) -> None:
        """Save the end of a finished run that goes on under its number.

        The new end takes the name of the final file.
        """
        iteration = self._final_iter - 1
        self.former_finals = (*self.former_finals, iteration)
        self._request(f"{self.file_prefix}_{iteration:07d}", iteration)

    def after_step(self) -> None:
        name = self.name_at(self.trainer.iter)
        if self._clock is not None:
            # asked in each iteration, since ranks may exchange
            is_over = self._clock.is_over(self.trainer.done)
            if is_over and name is None:
                name = f"{self.file_prefix}_{self.trainer.iter:07d}"
        if name is not None:
            self._request(name, self.trainer.iter, is_final=is_last(self.trainer))

    def after_train(self) -> None:
        status = self.trainer.status
        iteration = self.trainer.done - 1
        if status == "failed":
            self._wait_for_save()
            return
        if status == "finished" and self.save_last and self._final_iter != iteration + 1:
            self._request(f"{self.file_prefix}_final", iteration, is_final=True)
        elif status == "stopped" and iteration >= 0:
            # only the rank that writes knows of a failure
            is_saved = self._wait_for_save() == "" and self._saved == self._position()
            if not all(self.trainer.gather(is_saved)):
                self._request(f"{self.file_prefix}_{iteration:07d}", iteration)
        error_of_ranks = self.trainer.gather(self._wait_for_save())
        errors = [error for error in error_of_ranks if error]
        if errors:
            raise CheckpointError("; ".join(errors))

    def _request(self, name: str, iteration: int, *, is_final: bool = False) -> None:
        if self._clock is not None:
            self._clock.restart()
        if is_final:
            self._final_iter = iteration + 1
        self.trainer.request_save(name, partial(self._save, name, iteration))

    def _save(self, name: str, iteration: int) -> None:
        self._saved = self._position()
        self._writing = None
        self._failure = ""
        try:
            self._writing = self.save_and_rotate(name, iteration)
        except CheckpointError as error:
            self._failure = str(error)
            raise  # the trainer logs it

    def _position(self) -> tuple[int, int]:
        return self.trainer.done, self.trainer.boundary_done

    def _wait_for_save(self) -> str:
        """Wait for the file of this rank, never for other ranks.

        Returns the error of a failed save, or "".
        """
        error = None
        if isinstance(self._writing, Future):  # an overridden save may return anything
            error = self._writing.exception()
        return self._failure or str(error or "")


class _SaveClock:
    """Whether the time from one save to the next is over.

    At every n-th iteration rank 0 tells it to the others.
    """

    def __init__(self, period_sec: float) -> None:
        self._period_sec = period_sec

    def start(self, trainer: Any) -> None:
        """Start at 0; every rank calls it in the thread of the loop."""
        self._every = trainer.stop_check_period
        # without rank_keys not all ranks have this hook, so they cannot exchange
        self._group = comm.side_group("requests") if trainer.rank_keys else None
        self.restart()

    def restart(self) -> None:
        """The time counts from now."""
        self._end_sec = time.monotonic() + self._period_sec

    def is_over(self, done: int) -> bool:
        """Every rank calls it after each iteration, with the number of those that are done."""
        is_over = time.monotonic() >= self._end_sec
        if self._group is None:
            return is_over
        if done % self._every != 0:
            return False
        answer = torch.tensor(int(is_over), dtype=torch.int32, device="cpu")
        dist.broadcast(answer, src=0, group=self._group)
        return bool(answer)


@HOOK_REGISTRY.register()
class BestCheckpointer(MetricHook):
    """Save ``<file_prefix>`` when an evaluation gives the best value of ``val_metric`` so far.

    This does not move ``last_checkpoint``. If the file cannot be written, the error is logged and
    the value does not count; an asynchronous save counts when it starts. The entries ``best_of``,
    ``best_mode`` and ``best_value`` of the file have the metric, its mode and its value; a hook
    with ``evaluated_models`` makes these the ``model`` of the file. The checkpointer is trainkit's
    or fvcore's. For other arguments see `MetricHook`.
    """

    priority = SAVE_POINT + 3
    config_keys = (*MetricHook.config_keys, ("mode", "CHECKPOINT.BEST_MODE"))

    def __init__(
        self,
        eval_period: int,
        checkpointer: Any,
        val_metric: str,
        mode: Mode = "auto",
        file_prefix: str = "model_best",
    ) -> None:
        super().__init__(eval_period, val_metric, mode)
        self.checkpointer = checkpointer
        self.file_prefix = file_prefix
        self._state_before: dict[str, Any] = {}  # before the newest value

    def before_train(self) -> None:
        """Raises ConfigError if another hook writes the same file."""
        prefixes = [getattr(hook, "file_prefix", "") for hook in self.trainer.hooks]
        if prefixes.count(self.file_prefix) > 1:
            raise ConfigError(
                f"two hooks have the file_prefix {self.file_prefix!r}; give them different ones"
            )
        super().before_train()

    def after_train(self) -> None:
        super().after_train()
        if self.trainer.status == "finished":
            self.act_now()
            if isinstance(self.checkpointer, Checkpointer):
                self.checkpointer.wait()

    def act_now(self) -> None:
        self._state_before = self.state_dict()
        super().act_now()

    def judge(self, value: float) -> list[str]:
        """The names of the files to write."""
        return [self.file_prefix] if self.not_better == 0 else []

    def act(self, decision: list[str]) -> None:
        if self.best is not None and self.file_prefix in decision:  # on rank 0
            logger.info(
                "%s is %.5g, the best so far (%s)", self.monitored_metric, self.best, self.mode
            )
        for name in decision:
            self.trainer.request_save(name, partial(self._save, name, self.trainer.done - 1))

    def _save(self, name: str, iteration: int) -> None:
        try:
            self._save_untagged(name, iteration)
        except CheckpointError:
            self.undo()
            raise  # the trainer logs it

    def undo(self) -> None:
        """Forget the newest value, whose file cannot be written."""
        self.load_state_dict(self._state_before)

    def _save_untagged(self, name: str, iteration: int, **entries: Any) -> None:
        """Save without moving ``last_checkpoint``."""
        if isinstance(self.checkpointer, Checkpointer):
            entries["iteration"] = iteration
            entries["best_of"] = self.monitored_metric
            entries["best_mode"] = self.mode
            entries["best_value"] = self.best
            self.checkpointer.save(name, tag_last=False, **entries)
            return
        # fvcore's checkpointer always moves it, so it is put back
        tag_file = Path(self.checkpointer.save_dir) / "last_checkpoint"
        former_tag = tag_file.read_text(encoding="utf-8") if tag_file.exists() else None
        self.checkpointer.save(name, iteration=iteration)
        if not self.checkpointer.save_to_disk:
            return
        if former_tag is None:
            tag_file.unlink(missing_ok=True)
        else:
            self.checkpointer.tag_last_checkpoint(former_tag)

    def summary(self) -> str:
        if self.best is None or self.best_iter is None:
            return ""
        when = say_done(self.best_iter + 1)
        return (
            f"best {self.monitored_metric} {self.best:.5g} ({self.mode}) {when}: "
            f"{self.file_prefix}.pth"
        )


def best_file_prefixes(metrics: str | Sequence[str] | None) -> dict[str, str]:
    """metric -> ``file_prefix`` of its `BestCheckpointer`.

    ``model_best``, or if there are several metrics, ``model_best_<metric>``.
    """
    if not metrics:
        return {}
    if isinstance(metrics, str):
        metrics = [metrics]
    if len(metrics) == 1:
        return {metrics[0]: "model_best"}
    return {metric: f"model_best_{metric.replace('/', '_')}" for metric in metrics}
