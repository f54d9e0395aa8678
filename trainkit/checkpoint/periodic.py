"""PeriodicSaves: saves regularly and removes old files."""

import logging
import os
import re
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from trainkit.checkpoint.checkpointer import Checkpointer
from trainkit.checkpoint.format import CheckpointFormat
from trainkit.utils.periods import check_period, is_nth

_logger = logging.getLogger(__name__)


class PeriodicSaves:
    """Saves every ``period`` iterations, and at the end of the run.

    The files are ``<file_prefix>_<iteration>`` and ``<file_prefix>_final``.

    Args:
        checkpointer: a trainkit or an fvcore checkpointer.
        period: in iterations; 0: only at the end.
        max_iter: where the run ends; None: there is no final file.
        max_to_keep: number of periodic saves to keep; None: all. Older ones, also of an earlier
            process, are removed after the new one is on the disk. Final and best files are never
            removed, and do not count.
        start: number of iterations before the first periodic save; 0: one ``period``. The period
            counts from there.
        save_last: whether to write a final file.

    Attributes:
        former_finals: iterations whose numbered files are never removed.
    """

    former_finals: Sequence[int] = ()

    def __init__(
        self,
        checkpointer: Any,
        period: int,
        max_iter: int | None = None,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
        *,
        start: int = 0,
        save_last: bool = True,
    ) -> None:
        check_period("period", period)
        check_period("start", start)
        if max_iter is not None:
            check_period("max_iter", max_iter)
        if max_to_keep is not None:
            check_period("max_to_keep (None: keep all)", max_to_keep, minimum=1)
        self.checkpointer = checkpointer
        self.period = period
        self.max_iter = max_iter
        self.max_to_keep = max_to_keep
        self.file_prefix = file_prefix
        self.start = start
        self.save_last = save_last

    def step(self, iteration: int, **kwargs: Any) -> Future[None] | None:
        """Save if it is due; call it after iteration ``iteration``.

        Returns and raises as :meth:`Checkpointer.save`.
        """
        name = self.name_at(iteration)
        if name is None:
            return None
        return self.save_and_rotate(name, iteration, **kwargs)

    def name_at(self, iteration: int) -> str | None:
        """Name of the file that :meth:`step` writes after this iteration.

        None if it writes none.
        """
        if self.save_last and self.max_iter is not None and iteration >= self.max_iter - 1:
            return f"{self.file_prefix}_final"
        if is_nth(iteration + 1, self.period, self.start):
            return f"{self.file_prefix}_{iteration:07d}"
        return None

    def save(self, name: str, **kwargs: Any) -> Future[None] | None:
        """Save now, under any name."""
        return self.checkpointer.save(name, **kwargs)

    def save_and_rotate(self, name: str, iteration: int, **kwargs: Any) -> Future[None] | None:
        """Save now, then remove the oldest numbered files."""
        if isinstance(self.checkpointer, Checkpointer):
            remove_old = partial(self._remove_old, iteration)
            return self.save(name, iteration=iteration, on_commit=remove_old, **kwargs)
        self.save(name, iteration=iteration, **kwargs)
        self._remove_old(iteration)
        return None

    def _remove_old(self, iteration: int) -> None:
        """Remove all numbered files up to this iteration but the newest ones."""
        if self.max_to_keep is None or not self.checkpointer.save_to_disk:
            return
        folder = self.checkpointer.save_dir
        # a checkpointer of fvcore has no format
        file_format = getattr(self.checkpointer, "format", CheckpointFormat())
        try:
            numbered = self._numbered_files(folder)
            removable = []
            for number in sorted(numbered):
                # files of later iterations are from an earlier run in this folder
                if number <= iteration and number not in self.former_finals:
                    removable.append(number)
            removable.reverse()
            for number in removable[self.max_to_keep :]:
                file_format.remove(os.path.join(folder, numbered[number]))
        except OSError as error:
            _logger.warning("Old checkpoints are not removed, the next save tries again: %s", error)

    def _numbered_files(self, folder: str) -> dict[int, str]:
        """iteration -> name of the file."""
        pattern = re.compile(re.escape(self.file_prefix) + r"_(\d{7,})\.pth")
        files = {}
        for name in os.listdir(folder):
            match = pattern.fullmatch(name)
            if match is not None:
                files[int(match[1])] = name
        return files


PeriodicCheckpointer = PeriodicSaves
"""The name in fvcore and detectron2; the hook of this name is in `trainkit.engine.hooks`."""
