"""The hook that calls the writers."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trainkit.checkpoint.errors import loading
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase, Priority
from trainkit.engine.hooks.evaluation import EvalHook
from trainkit.engine.hooks.timer import IterationTimer
from trainkit.utils import comm
from trainkit.utils.events import EventStorage, EventWriter, estimate_eta_sec, get_event_storage
from trainkit.utils.periods import check_period, is_due

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PeriodicWriter(HookBase):
    """Call the writers every ``period`` iterations, on rank 0.

    Also after each evaluation, after the last iteration, and at the end. The hook runs after every
    other hook, and deletes images and histograms from the storage after each write. The writers are
    closed at the end; if the trainer trains again, they continue. If a run was stopped or has
    failed, a resumed run writes its last values again. An OSError of a writer (a full disk) is
    logged, and the writer is called again next time; at the end of a finished run the run fails.
    """

    priority = Priority.LOWEST + 1
    config_keys = (("period", "LOG.PERIOD"),)

    def __init__(self, writers: Sequence[EventWriter], period: int = 20) -> None:
        self._writers = list(writers)
        self._period = check_period("period", period, minimum=1)
        # states of the writers for a run that is resumed: loaded, or those before the last write of
        # a run that was stopped or has failed
        self._states_to_resume: list[dict[str, Any]] | None = None
        # states of the writers at the end of a finished run, and its storage
        self._finished_states: list[dict[str, Any]] | None = None
        self._finished_storage: EventStorage | None = None
        self._lost: list[str] = []  # the errors of the last write

    def before_train(self) -> None:
        if not comm.is_main_process():
            self._writers = []  # the values are those of all ranks
        states: list[dict[str, Any]] = []
        if self._finished_states is not None and self._finished_storage is self.trainer.storage:
            states = self._finished_states  # the finished run goes on
        elif self._states_to_resume is not None and self.trainer.start_iter > 0:
            states = self._states_to_resume
        self._give_states(states)
        self._states_to_resume = None
        self._finished_states = None
        self._finished_storage = None
        self._eval_hooks = [hook for hook in self.trainer.hooks if isinstance(hook, EvalHook)]
        self._timers = [hook for hook in self.trainer.hooks if isinstance(hook, IterationTimer)]
        self._with_progress = [
            writer
            for writer in self._writers
            if type(writer).show_progress is not EventWriter.show_progress
        ]
        for writer in self._writers:
            writer.begin(self.trainer)
        if self.trainer.start_iter == 0 and self._was_evaluated(0):
            self.trainer.storage.publish(self._write)

    def _give_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the states of writers, which may be others now.

        The first writer of a class gets the first state of the class.
        """
        remaining = list(states)
        for writer in self._writers:
            name = type(writer).__name__
            for entry in remaining:
                if entry["class"] == name:
                    remaining.remove(entry)
                    with loading(f"the state of the writer {name!r}"):
                        writer.load_state_dict(entry["state"])
                    break

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        for writer in self._with_progress:
            writer.show_progress(done)
        if is_due(self.trainer, self._period, or_last=True) or self._was_evaluated(done):
            self.trainer.storage.publish(self._write)

    def _was_evaluated(self, done_iters: int) -> bool:
        """Whether an evaluation was just done.

        Its results are written now: writers show only the newest value.
        """
        return any(hook.evaluated_iters == done_iters for hook in self._eval_hooks)

    def after_train(self) -> None:
        """Write for the last time, and close the writers.

        Raises OSError on every rank if the run has finished and its last values are not on the
        disk.
        """
        try:
            self.trainer.storage.publish(partial(self._write, at_end=True))
            self.trainer.storage.flush()
        finally:
            for writer in self._writers:
                self._try(writer.close)
        if self.trainer.status != "finished":
            return
        lost: list[str] = []
        for errors_of_rank in self.trainer.gather(self._lost):
            lost.extend(errors_of_rank)
        if lost:
            raise OSError(
                "the run is at its end, but not all of its values are on the disk: "
                f"{'; '.join(lost)}"
            )

    def _write(self, *, at_end: bool = False) -> None:
        """Call each writer. If the storage defers, this runs in its worker."""
        storage = get_event_storage()
        self._lost = []
        is_interrupted = at_end and self.trainer.status != "finished"
        if is_interrupted:
            # before the last write, since a resumed run writes these values again
            self._states_to_resume = self._writer_states()
        if not at_end:
            hooks_sec = sum(timer.hooks_sec_per_iter for timer in self._timers)
            eta_sec = estimate_eta_sec(storage, self.trainer.max_iter, hooks_sec)
            if eta_sec is not None:
                storage.put_scalar("eta_seconds", eta_sec, smoothing_hint=False)
        with storage.hold_images():
            for writer in self._writers:
                self._try(writer.write)
        if is_interrupted:
            return
        storage.clear_images()
        storage.clear_histograms()
        if at_end:
            # for a run that goes on; another one may train these iterations again
            self._finished_states = self._writer_states()
            self._finished_storage = self.trainer.storage

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            logger.error("%s failed: %s", call.__qualname__, error)
            self._lost.append(f"{call.__qualname__} failed: {error}")

    def state_dict(self) -> dict[str, Any]:
        """The writers' states after their last regular write, also if they are closed already."""
        if self.trainer is not None:
            self.trainer.storage.flush()
        states = self._states_to_resume or self._finished_states or self._writer_states()
        return {"writers": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until training starts, since writers cut their files only then.

        Does nothing during a run.
        """
        if self.trainer is None or self.trainer.status != "running":
            waiting = [dict(entry) for entry in state_dict["writers"]]
            for entry in waiting:
                entry["state"] = dict(entry["state"])
                entry["class"] = str(entry["class"])
            self._states_to_resume = waiting

    def _writer_states(self) -> list[dict[str, Any]]:
        return [
            {"class": type(writer).__name__, "state": writer.state_dict()}
            for writer in self._writers
        ]
