"""The hook that calls the writers."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase, Priority
from trainkit.engine.hook_list import is_timed
from trainkit.engine.hooks.evaluation import EvalHook
from trainkit.utils.events import EventWriter, estimate_eta_sec, get_event_storage
from trainkit.utils.periods import check_period, is_due, next_due

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PeriodicWriter(HookBase):
    """Call the writers every ``period`` iterations, after each evaluation, after the last iteration, and at the end.

    It runs after every other hook. The writers are closed at the end; if the trainer trains again, they continue. If a
    run was stopped or has failed, a resumed run writes its last values again.

    If a writer raises an OSError (a full disk), the error is logged once and the writer is called again next time. If
    it still fails at the end of a finished run, the run fails. Images and histograms are deleted from the storage after
    each write, unless there is a second `PeriodicWriter`.
    """

    priority = Priority.LOWEST + 1

    def __init__(self, writers: Sequence[EventWriter], period: int = 20) -> None:
        self._writers = list(writers)
        for writer in self._writers:
            if not isinstance(writer, EventWriter):
                raise TypeError(f"writers must be EventWriter objects, got {writer!r}")
        self._period = check_period("period", period, minimum=1)
        self._waiting: list[dict[str, Any]] | None = None  # states for the writers when training continues
        self._ended: list[dict[str, Any]] | None = None  # states at the end of a finished run
        self._failing: set[int] = set()  # indices of writers, since a writer may be unhashable
        self._lost: list[str] = []  # errors at the end
        self._alone = True

    @classmethod
    def config_arguments(cls, trainer: Any) -> Mapping[str, Any]:
        return {"period": trainer.cfg.LOG.PERIOD}

    def before_train(self) -> None:
        if self._waiting is not None and self.trainer.start_iter > 0:
            self._hand_out(self._waiting)
        self._waiting = self._ended = None
        self._failing.clear()
        self._alone = sum(isinstance(hook, PeriodicWriter) for hook in self.trainer.hooks) == 1
        self._eval_hooks = [hook for hook in self.trainer.hooks if isinstance(hook, EvalHook)]
        for writer in self._writers:
            writer.begin(self.trainer)
        if self.trainer.start_iter == 0 and self._was_evaluated(0):
            self.trainer.storage.publish(self._write_on_the_way)

    def after_step(self) -> None:
        if is_due(self.trainer, self._period, or_last=True) or self._was_evaluated(self.trainer.iter + 1):
            self.trainer.storage.publish(self._write_on_the_way)
            self.trainer.storage.catch_up()

    def next_due(self, done: int) -> int:
        can_wait = all(is_timed(type(hook)) for hook in self._eval_hooks)
        return next_due(self.trainer, done, self._period) if can_wait else done + 1

    def _was_evaluated(self, done_iters: int) -> bool:
        """Whether an evaluation was just done. Its results are written now: writers show only the newest value."""
        return any(hook.evaluated_iters == done_iters for hook in self._eval_hooks)

    def after_train(self) -> None:
        """Raises OSError on every rank if the run has finished and its last values are not on the disk."""
        self._lost.clear()
        with ExitStack() as closing:
            for writer in reversed(self._writers):
                closing.callback(self._close, writer)  # close every writer, even if one fails
            self.trainer.storage.publish(self._write_at_the_end)
            self.trainer.storage.flush()
        if self.trainer.status == "finished":
            lost = [text for by_rank in self.trainer.gather(self._lost) for text in by_rank]
            if lost:
                raise OSError(
                    f"the run is at its end, but not all of its values are on the disk: {'; '.join(lost)}. Make "
                    "the folder writable and use --resume, which writes them"
                )

    # ------------------------------------------------------------------ writing, in the worker if the storage defers

    def _write_on_the_way(self) -> None:
        storage = get_event_storage()
        eta_sec = estimate_eta_sec(storage, self.trainer.max_iter)
        if eta_sec is not None:
            storage.put_scalar("eta_seconds", eta_sec, smoothing_hint=False)
        failed = self._write()
        for i, error in failed.items():
            if i not in self._failing:
                logger.error("%s cannot write, training continues: %s", type(self._writers[i]).__name__, error)
        self._failing = set(failed)

    def _write_at_the_end(self) -> None:
        interrupted = self.trainer.status != "finished"
        if interrupted:
            self._waiting = self._writer_states()
        for i, error in self._write(keep_images=interrupted).items():
            self._note_loss(f"{type(self._writers[i]).__name__} cannot write its last lines: {error}")
        if not interrupted:
            self._ended = self._writer_states()  # not for the next run, which may train these iterations again

    def _write(self, *, keep_images: bool = False) -> dict[int, OSError]:
        """Call each writer; return index -> error of those that fail."""
        storage, errors = get_event_storage(), {}
        with storage.hold_images() if self._alone or keep_images else nullcontext():
            for i, writer in enumerate(self._writers):
                try:
                    writer.write()
                except OSError as error:
                    errors[i] = error
        if self._alone and not keep_images:
            storage.clear_images()
            storage.clear_histograms()
        return errors

    def _close(self, writer: EventWriter) -> None:
        try:
            writer.close()
        except OSError as error:
            self._note_loss(f"{type(writer).__name__} cannot be closed: {error}")

    def _note_loss(self, text: str) -> None:
        logger.error("%s", text)
        self._lost.append(text)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The writers' states after their last regular write, also if the writers are closed already."""
        storage = getattr(self.trainer, "storage", None)  # there is none before the first run
        if storage is not None:
            storage.flush()
        return {"writers": self._waiting or self._ended or self._writer_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until training starts, since writers cut their files only then. Does nothing during a run."""
        if self.trainer is None or self.trainer.status != "running":
            self._waiting = state_dict["writers"]

    def _writer_states(self) -> list[dict[str, Any]]:
        return [{"class": type(writer).__name__, "state": writer.state_dict()} for writer in self._writers]

    def _hand_out(self, states: Sequence[dict[str, Any]]) -> None:
        """Give the first writer of a class the first state of that class, and so on; writers may have changed."""
        left = list(states)
        for writer in self._writers:
            found = next((entry for entry in left if entry["class"] == type(writer).__name__), None)
            if found is not None:
                left.remove(found)
                writer.load_state_dict(found["state"])
