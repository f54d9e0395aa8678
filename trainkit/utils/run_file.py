"""A file to which a run appends lines."""

import logging
import os
import shutil
from io import FileIO
from pathlib import Path

logger = logging.getLogger(__name__)


class RunFile:
    """A file that grows by whole lines; a resumed run first cuts off the lines that it will write again.

    Nothing is changed before the first ``append``. ``header`` is the first line of a new file.
    """

    def __init__(self, path: str | Path, header: str = "") -> None:
        self._path, self._header = Path(path), header
        self._file: FileIO | None = None
        self._start: int | None = None  # where the lines of this run go on; None: at the end of the file

    def append(self, lines: str) -> None:
        """Write all of the lines, or raise OSError and write none of them."""
        file = self._file = self._file or self._open()
        if os.fstat(file.fileno()).st_nlink == 0:
            raise FileNotFoundError(f"{self._path} was deleted while the run was writing it")
        length = file.seek(0, os.SEEK_END)
        rest = memoryview((lines if length else self._header + lines).encode(errors="backslashreplace"))
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(length)
            raise

    def sync(self) -> int:
        """Write the lines to the disk; return the length in bytes, for ``go_on_at``."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            return self._file.seek(0, os.SEEK_END)
        if self._start is not None:
            return self._start
        return self._path.stat().st_size if self._path.exists() else 0

    def go_on_at(self, length: int) -> None:
        """At the next ``append``, move everything after ``length`` bytes into a new file in the same folder."""
        self.close()
        self._start = length

    def close(self) -> None:
        """Close the file; later lines are appended to it."""
        self._start = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        size = self._path.stat().st_size if self._path.exists() else 0
        if self._start is not None and size < self._start:
            logger.warning("%s has lost its last %d bytes", self._path, self._start - size)
        elif self._start is not None and size > self._start:
            aside = _copy_tail(self._path, self._start)
            os.truncate(self._path, self._start)
            logger.info("%s continues after byte %d; the later lines are in %s", self._path, self._start, aside.name)
        self._start = None
        return FileIO(self._path, "ab")


def _copy_tail(path: Path, start: int) -> Path:
    """Copy everything after ``start`` bytes to a new file ``NAME.cut_<n>`` in the same folder."""
    n = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.cut_{n}")):
        n += 1
    try:
        with path.open("rb") as source, aside.open("xb") as target:
            source.seek(start)
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return aside
