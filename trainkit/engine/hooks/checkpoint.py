"""When the model is saved."""

import logging
from pathlib import Path
from typing import Any, Literal

from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint import PeriodicCheckpointer as _PeriodicCheckpointer
from trainkit.engine.hooks.monitor import MetricMonitor
from trainkit.engine.train_loop import HookBase, check_period, is_due
from trainkit.utils import comm

logger = logging.getLogger(__name__)


class PeriodicCheckpointer(_PeriodicCheckpointer, HookBase):
    """`trainkit.checkpoint.PeriodicCheckpointer` as a hook; the run's length is the trainer's.

    A periodic save that fails (a full disk) is logged, and the run goes on from the checkpoints that it has; if the
    final one fails, the run has failed.
    """

    def before_train(self) -> None:
        self.max_iter = self.trainer.max_iter
        self._final_iter: int | None = None

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if is_due(self.trainer, self.period, or_last=True):
            self.trainer.storage.flush()  # a loss that is not finite is found before the checkpoint
        try:
            self.step(self.trainer.iter)
        except CheckpointError as error:
            if done >= self.trainer.max_iter:
                raise
            logger.error("The checkpoint of iteration %d is not saved, training goes on: %s", self.trainer.iter, error)
        if done >= self.trainer.max_iter:
            self._final_iter = done

    def after_train(self) -> None:
        if self.trainer.status == "finished" and self._final_iter != self.trainer.iter:  # finished early
            self.save(f"{self.file_prefix}_final", iteration=self.trainer.iter - 1)


class BestCheckpointer(HookBase):
    """Save ``<file_prefix>`` whenever an evaluation gave the best value of ``val_metric`` so far.

    It stands behind the `EvalHook` and has its ``eval_period``. ``--resume`` goes on from the newest checkpoint, not
    from the best one: this save does not move ``last_checkpoint``. All ranks follow rank 0, which has the metrics.

    Args:
        checkpointer: ours or fvcore's.
        mode: whether "max" or "min" is better.
    """

    def __init__(
        self,
        eval_period: int,
        checkpointer: Any,
        val_metric: str,
        mode: Literal["max", "min"] = "max",
        file_prefix: str = "model_best",
    ) -> None:
        self._period = check_period("eval_period", eval_period)
        self._checkpointer = checkpointer
        self._monitor = MetricMonitor(val_metric, mode)
        self._file_prefix = file_prefix

    def before_train(self) -> None:
        if self.trainer.start_iter == 0:
            self._monitor.forget()

    def after_step(self) -> None:
        if is_due(self.trainer, self._period) and self.trainer.iter + 1 < self.trainer.max_iter:
            try:
                self._save_if_best(self.trainer.iter)
            except CheckpointError as error:
                logger.error("The best checkpoint so far is not saved, training goes on: %s", error)

    def after_train(self) -> None:
        if self.trainer.status == "finished":
            self._save_if_best(self.trainer.iter - 1)

    def _save_if_best(self, iteration: int) -> None:
        self.trainer.storage.flush()  # on every rank: what rank 0 reads may need the metrics of the others
        before = self._monitor.state_dict()
        better = comm.is_main_process() and self._monitor.update(self.trainer.storage)
        if not comm.broadcast(bool(better)):
            return
        if comm.is_main_process():
            logger.info("%s is %.5g, the best so far", self._monitor.metric, self._monitor.best)
        try:
            self._save(iteration)
        except CheckpointError:
            self._monitor.load_state_dict(before)  # the best file is still the one before
            raise

    def _save(self, iteration: int) -> None:
        if isinstance(self._checkpointer, Checkpointer):
            self._checkpointer.save(self._file_prefix, tag_last=False, iteration=iteration)
        else:
            self._save_and_restore_tag(iteration)

    def _save_and_restore_tag(self, iteration: int) -> None:
        """A checkpointer that cannot save without tagging gets its tag back."""
        tag = Path(self._checkpointer.save_dir) / "last_checkpoint"
        before = tag.read_text() if tag.exists() else None
        self._checkpointer.save(self._file_prefix, iteration=iteration)
        if self._checkpointer.save_to_disk:
            if before is None:
                tag.unlink(missing_ok=True)
            else:
                self._checkpointer.tag_last_checkpoint(before)

    def state_dict(self) -> dict[str, Any]:
        return self._monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._monitor.load_state_dict(state_dict)
