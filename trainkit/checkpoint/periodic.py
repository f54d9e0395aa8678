"""PeriodicCheckpointer: when to save, and which old files to remove."""

import logging
import os
import re
from typing import Any, Protocol

_logger = logging.getLogger(__name__)


class _Saver(Protocol):
    """What is needed of a checkpointer; fvcore's has it too."""

    save_dir: str
    save_to_disk: bool

    def save(self, name: str, **kwargs: Any) -> None: ...


class PeriodicCheckpointer:
    """Saves every ``period`` iterations as ``<file_prefix>_<iteration>`` and at the end as ``<file_prefix>_final``.

    A periodic save that falls on the last iteration is left out, since ``<file_prefix>_final`` is the same. Files
    beyond ``max_to_keep`` are found by listing the folder, so a restarted run goes on with the rotation.

    Args:
        checkpointer: ours or fvcore's.
        period: in iterations; 0: only at the end.
        max_iter: iterations of the run; None: no end.
        max_to_keep: numbered files to keep, at least 1; None: all. Final and best files are never removed.
        file_prefix: of the file names.

    Raises:
        ValueError: ``period`` is negative, or ``max_to_keep`` less than 1.
    """

    def __init__(
        self,
        checkpointer: _Saver,
        period: int,
        max_iter: int | None = None,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
    ) -> None:
        if period < 0:
            raise ValueError(f"period must be >= 0 iterations (0: save only at the end), got {period}")
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be >= 1 file, or None to keep all, got {max_to_keep}")
        self.checkpointer = checkpointer
        self.period = period
        self.max_iter = max_iter
        self.max_to_keep = max_to_keep
        self.file_prefix = file_prefix

    def step(self, iteration: int, **kwargs: Any) -> None:
        """Save if it is time; call it after each iteration.

        Args:
            iteration: the one just done, from 0; stands in the file as ``iteration``.
            kwargs: further entries of the file.

        Raises:
            CheckpointError: as :meth:`Checkpointer.save`.
        """
        if self.max_iter is not None and iteration >= self.max_iter - 1:
            self.save(f"{self.file_prefix}_final", iteration=iteration, **kwargs)
        elif self.period > 0 and (iteration + 1) % self.period == 0:
            self.save(f"{self.file_prefix}_{iteration:07d}", iteration=iteration, **kwargs)
            self._rotate(iteration)

    def save(self, name: str, **kwargs: Any) -> None:
        """Save now, under a name of your own."""
        self.checkpointer.save(name, **kwargs)

    def _rotate(self, iteration: int) -> None:
        if self.max_to_keep is None or not self.checkpointer.save_to_disk or not self.checkpointer.save_dir:
            return
        numbered = self._numbered_files()
        if iteration not in numbered:  # not committed yet: the old ones are still needed
            return
        # Files of later iterations belong to an earlier run in this folder; they are neither counted nor removed.
        past = sorted(number for number in numbered if number <= iteration)
        for number in past[: -self.max_to_keep]:
            path = os.path.join(self.checkpointer.save_dir, numbered[number])
            try:
                os.remove(path)
            except OSError as error:
                _logger.warning("Cannot remove the old checkpoint '%s': %s", path, error.strerror)

    def _numbered_files(self) -> dict[int, str]:
        """Return iteration -> file name."""
        pattern = re.compile(re.escape(self.file_prefix) + r"_(\d{7,})\.pth")
        matches = map(pattern.fullmatch, os.listdir(self.checkpointer.save_dir))
        return {int(match[1]): match[0] for match in matches if match}
