"""A limit of the time of a run."""

import time

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils.periods import parse_time


@HOOK_REGISTRY.register()
class TimeLimit(HookBase):
    """Stop the run and save it, as a signal does, when ``train()`` has taken ``max_time``, such as ``1d 12h``.

    A resumed run has the whole time again.
    """

    config_keys = (("max_time", "MAX_TIME"),)

    def __init__(self, max_time: str) -> None:
        self._max_time = max_time
        self._limit_sec = parse_time(max_time, "MAX_TIME")

    def before_train(self) -> None:
        self._end = time.monotonic() + self._limit_sec

    def after_step(self) -> None:
        if time.monotonic() >= self._end:
            self._end += self._limit_sec  # ask once
            self.trainer.request_stop(f"MAX_TIME {self._max_time} is over")
