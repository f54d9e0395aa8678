"""When the writers write."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from trainkit.engine.hooks.registry import HOOK_REGISTRY
from trainkit.engine.train_loop import HookBase, Priority, check_period, is_due
from trainkit.utils.events import EventWriter, estimate_eta_sec, get_event_storage

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PeriodicWriter(HookBase):
    """Let the writers write every ``period`` iterations, after the last one, and at the end of training.

    It runs behind every other hook, so that what they put is written too. The writers are closed at the end and go on
    where they were if the trainer trains again.

    Raises:
        TypeError: an entry is no `EventWriter`.
        ValueError: ``period`` is less than 1 iteration.
    """

    priority = Priority.LOWEST + 1

    def __init__(self, writers: Sequence[EventWriter], period: int = 20) -> None:
        self._writers = list(writers)
        for writer in self._writers:
            if not isinstance(writer, EventWriter):
                raise TypeError(f"writers must be EventWriter objects, got {writer!r}")
        self._period = check_period("period", period, minimum=1)

    def after_step(self) -> None:
        if is_due(self.trainer, self._period, or_last=True):
            self.trainer.storage.publish(self._write)

    def after_train(self) -> None:
        with ExitStack() as closing:
            for writer in reversed(self._writers):
                closing.callback(writer.close)  # each of them, whatever fails
            self.trainer.storage.publish(self._write)
            self.trainer.storage.flush()

    def _write(self) -> None:
        storage = get_event_storage()
        eta_sec = estimate_eta_sec(storage, self.trainer.max_iter)
        if eta_sec is not None and storage.iter < self.trainer.max_iter:
            storage.put_scalar("eta_seconds", eta_sec, smoothing_hint=False)
        for writer in self._writers:
            writer.write()
