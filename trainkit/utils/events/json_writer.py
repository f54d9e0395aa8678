"""The writer of ``metrics.json``."""

import itertools
import logging
import math
import os
from io import FileIO
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

from trainkit.utils.events.storage import EventStorage
from trainkit.utils.events.writers import Row, ScalarWriter

logger = logging.getLogger(__name__)


class LinesWriter(ScalarWriter):
    """Base class of writers that append lines to a file; a subclass defines ``format``.

    The file is opened at the first write with a new scalar; ``header`` is its first line. In a resumed run, this write
    first moves the lines after the checkpoint into ``<path>.cut_1`` (or ``_2``, ...).
    """

    def __init__(self, path: str | Path, window_size: int, header: str = "") -> None:
        super().__init__(window_size)
        self._path, self._header = Path(path), header
        self._file: FileIO | None = None
        self._start: int | None = None  # where the lines of this run continue; None: at the end of the file

    def format(self, rows: list[Row]) -> str:
        """The lines for these rows."""
        raise NotImplementedError

    def close(self) -> None:
        super().close()
        file, self._file, self._start = self._file, None, None
        if file is not None:
            file.close()

    def state_dict(self) -> dict[str, Any]:
        """The state after all lines are written to the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        size = self._path.stat().st_size if self._path.exists() else 0
        return {"length": size if self._start is None else self._start, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        super().load_state_dict(state)
        self._start = state["length"]

    def _show(self, rows: list[Row], storage: EventStorage) -> None:
        if not rows:
            return
        file = self._file = self._file or self._open()
        if os.fstat(file.fileno()).st_nlink == 0:
            raise FileNotFoundError(f"{self._path} was deleted during the run")
        length, lines = file.seek(0, os.SEEK_END), self.format(rows)
        rest = memoryview((lines if length else self._header + lines).encode(errors="backslashreplace"))
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(length)  # no part of a line
            raise

    def _open(self) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._start is not None and self._path.exists() and (tail := self._path.read_bytes()[self._start :]):
            names = (f"{self._path}.cut_{n}" for n in itertools.count(1))
            aside = Path(next(name for name in names if not os.path.lexists(name)))
            aside.write_bytes(tail)
            os.truncate(self._path, self._start)
            logger.info("%s continues after byte %d; the later lines are in %s", self._path, self._start, aside.name)
        self._start = None
        return FileIO(self._path, "ab")


class JSONWriter(LinesWriter):
    """One line of JSON per iteration with new scalars, smoothed; a value that is not finite is ``null``.

    Scalars that were put with an epoch get separate lines, with ``epoch`` and ``iteration``. Read the file by
    ``pandas.read_json(path, lines=True)``. The file grows and is cut as `LinesWriter` says.
    """

    def __init__(self, json_file: str | Path, window_size: int = 20) -> None:
        super().__init__(json_file, window_size)

    def format(self, rows: list[Row]) -> str:
        lines = ""
        for iter, epoch, row in rows:
            line = {"iteration": iter, **row} if epoch is None else {"iteration": iter, "epoch": epoch, **row}
            # json.dumps takes three times as long
            items = [
                f"{encode_basestring_ascii(name)}: {value if math.isfinite(value) else 'null'}"
                for name, value in sorted(line.items())
            ]
            lines += "{" + ", ".join(items) + "}\n"
        return lines
