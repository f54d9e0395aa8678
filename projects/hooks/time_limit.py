"""A limit of the time of a run."""

import re
import time

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase


@HOOK_REGISTRY.register()
class TimeLimit(HookBase):
    """Stop the run and save it, as a signal does, when ``train()`` has taken ``max_time``, such as ``1d 12h``.

    A resumed run has the whole time again.
    """

    config_keys = (("max_time", "MAX_TIME"),)

    def __init__(self, max_time: str) -> None:
        self._max_time, self._limit_sec = max_time, parse_time(max_time)

    def before_train(self) -> None:
        self._end = time.monotonic() + self._limit_sec

    def after_step(self) -> None:
        if time.monotonic() >= self._end:
            self._end += self._limit_sec  # ask once
            self.trainer.request_stop(f"MAX_TIME {self._max_time} is over")


def parse_time(text: object) -> float:
    """The seconds of a text such as ``1d 12h``. Raises ConfigError if it is another text."""
    if not re.fullmatch(r"(?=.*[1-9])( *\d+(\.\d+)?[dhms])+", str(text)):
        raise ConfigError(
            f"MAX_TIME: got {text!r}; accepted: a time above 0, such as 23h, 90m or 1d 12h"
        )
    units = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
    return sum(
        float(part) * units[unit] for part, unit in re.findall(r"([\d.]+)([dhms])", str(text))
    )
