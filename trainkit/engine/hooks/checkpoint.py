"""When the model is saved."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint import PeriodicCheckpointer as _PeriodicCheckpointer
from trainkit.checkpoint.periodic import check_file_prefix
from trainkit.config import ConfigError
from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks.monitor import MetricMonitor, Mode
from trainkit.engine.hooks.registry import HOOK_REGISTRY
from trainkit.engine.periods import check_period, is_due, is_last
from trainkit.utils import comm

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PeriodicCheckpointer(_PeriodicCheckpointer, HookBase):
    """`trainkit.checkpoint.PeriodicCheckpointer` as a hook; the run's length is the trainer's.

    A periodic save that fails (a full disk) is logged, and the run goes on from the checkpoints that it has; if that of
    the last iteration fails, the run has failed.
    """

    def before_train(self) -> None:
        self.max_iter = self.trainer.max_iter
        self._final_iter: int | None = None

    def after_step(self) -> None:
        if self.name_at(self.trainer.iter) is not None:
            self.trainer.storage.flush()  # a loss that is not finite is found before the checkpoint
        try:
            self.step(self.trainer.iter)
        except CheckpointError as error:
            if is_last(self.trainer):
                raise
            logger.error("The checkpoint of iteration %d is not saved, training goes on: %s", self.trainer.iter, error)
        if is_last(self.trainer):
            self._final_iter = self.trainer.iter + 1

    def after_train(self) -> None:
        finished_early = self.trainer.status == "finished" and self._final_iter != self.trainer.iter
        if finished_early and self.save_last:
            self.save(f"{self.file_prefix}_final", iteration=self.trainer.iter - 1)


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

    @property
    def monitored_metric(self) -> str:
        """The evaluation result that it needs."""
        return self._monitor.metric

    def before_train(self) -> None:
        """
        Raises:
            ValueError: another hook writes the same file.
        """
        for hook in self.trainer._hooks:
            if isinstance(hook, BestCheckpointer) and hook is not self and hook.file_prefix == self.file_prefix:
                raise ConfigError(
                    f"BestCheckpointer of {hook.monitored_metric} and of {self.monitored_metric} both write "
                    f"{self.file_prefix!r}; give them different file_prefix (or name both in CHECKPOINT.BEST_METRIC)"
                )
        self._monitor.begin(self.trainer.start_iter)

    def after_step(self) -> None:
        if is_due(self.trainer, self._period, offset=self._offset) and not is_last(self.trainer):
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
        if isinstance(self.checkpointer, Checkpointer):
            self.checkpointer.save(self.file_prefix, tag_last=False, iteration=iteration)
        else:
            self._save_and_restore_tag(iteration)

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
        return self._monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._monitor.load_state_dict(state_dict)


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
