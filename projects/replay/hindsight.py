"""Run a new hook over past iterations of a run."""

import json
import math
import os
from collections.abc import Callable
from typing import Any

from trainkit.projects.replay.checkpoints import Values, around, compare_way, logged_values
from trainkit.projects.replay.session import Session, Start

from trainkit.checkpoint.atomic import write_text
from trainkit.config import ConfigError
from trainkit.engine import HookBase
from trainkit.utils import comm


def replay_range(
    run: str | os.PathLike[str],
    first: int,
    end: int,
    make_hook: Callable[[], HookBase],
    output_dir: str | os.PathLike[str],
    start: Start = None,
) -> str:
    """Perform iterations ``first`` to ``end`` - 1 of a run again, with one more hook; the run is not changed.

    Call it in as many processes as the run had. It writes the values that the hook puts into the storage, and the
    values of the run, to ``metrics.json`` in ``output_dir``: a line for each iteration, null for a value that is not
    finite.

    Args:
        make_hook: makes the hook; called on each rank.
        start: see `replay`.

    Returns:
        A comparison of the values with those that the run has stored; it shows whether the hook has changed the run. If
        an iteration fails: "FAILED" and the reason; the values before this iteration are written.

    Raises:
        CheckpointError: no checkpoint can be used, or the run had another number of processes.
        ConfigError: the run has fewer iterations.
    """
    values, text = Range(os.path.abspath(run), first, end, make_hook).perform(start)
    if comm.is_main_process():
        lines = []
        for iter, row in sorted(values.items()):
            finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
            lines.append(json.dumps({"iteration": iter, **finite}) + "\n")
        os.makedirs(output_dir, exist_ok=True)
        write_text("".join(lines), os.path.join(output_dir, "metrics.json"))
    return str(text)


class Range(Session):
    """``work`` returns the values of the iterations, and their comparison with those of the run."""

    def __init__(self, run: str, first: int, end: int, make_hook: Callable[[], HookBase]) -> None:
        super().__init__(run, first, *around(run, first))
        self._after = around(run, end - 1)[1]
        self._end, self._make_hook = end, make_hook

    def work(self, trainer: Any) -> tuple[Values, str]:
        if self._end > trainer.max_iter:
            raise ConfigError(f"--range ends with {self._end}; the run ends with {trainer.max_iter}; make it smaller")
        self._go_on(self._at - 1)
        error = self._go_on(self._end - 1, self._make_hook())
        values = logged_values(trainer.storage.state_dict(), self._at, self._end)
        way = compare_way(values, self._after, self._end - 1)[0] if comm.is_main_process() else ""
        if error:
            way = f"FAILED in iteration {trainer.iter}: {error.partition('. ')[0]}; {way}"
        return values, comm.broadcast(way)
