"""The file to which a run appends lines."""

import contextlib
import logging
import os
import shutil
from io import FileIO
from pathlib import Path

logger = logging.getLogger(__name__)


class RunFile:
    """It only grows, by whole lines; a run that is resumed cuts off what it is going to write again.

    Nothing is touched before the first ``append``.
    """

    def __init__(self, path: str | Path, header: str = "") -> None:
        """``header`` is the first line, in front of those that are appended."""
        self._path, self._header = Path(path), header
        self._file: FileIO | None = None
        self._length: int | None = None  # of what belongs to the run; None: all that is there when it is opened

    def append(self, lines: str) -> None:
        """Write all of the lines.

        Raises:
            OSError: none of them has been written, and a later call may succeed.
        """
        try:
            file = self._open()
            rest = memoryview((lines if self._length else self._header + lines).encode())
            while rest:
                rest = rest[file.write(rest) :]
            self._length = file.seek(0, os.SEEK_END)
        except OSError:
            with contextlib.suppress(OSError):  # the next one who opens the file tries again
                self._take_back()
            raise

    def sync(self) -> int:
        """Bring the lines onto the disk; returns the length in bytes, for ``go_on_at``."""
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                logger.error("%s: a power failure may lose its last lines: %s", self._path, error)
        if self._length is None:
            return self._path.stat().st_size if self._path.exists() else 0
        return self._length

    def go_on_at(self, length: int) -> None:
        """With the next ``append``, cut off what is behind ``length`` and keep it in a file beside this one."""
        self.close()
        self._length = length

    def close(self) -> None:
        """What follows is appended to what is there then."""
        self._length = None
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _open(self) -> FileIO:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = FileIO(self._path, "ab")
            try:
                size = os.fstat(file.fileno()).st_size
                self._length = size if self._length is None else self._cut(file, self._length, size)
            except BaseException:
                file.close()
                raise
            self._file = file
        return self._file

    def _take_back(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None  # its disk may be gone
            with file:
                file.truncate(self._length)

    def _cut(self, file: FileIO, length: int, size: int) -> int:
        content = self._path.read_bytes() if size < length else b""
        if size < length:
            logger.warning(
                "%s has %d of the %d bytes that this run has written; the lines that are missing are lost",
                self._path,
                size,
                length,
            )
            length = content.rfind(b"\n") + 1
        elif length > 0 and self._byte(length - 1) != b"\n":
            logger.warning("%s is not the file to which this run has written; it is begun anew", self._path)
            length = 0
        if size > length:
            aside = copy_tail(self._path, length, self._path.name)
            file.truncate(length)
            os.fsync(file.fileno())
            logger.info(
                "%s goes on behind byte %d; the lines that stood there are in %s", self._path, length, aside.name
            )
        return length

    def _byte(self, position: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(position)
            return file.read(1)


def copy_tail(path: Path, length: int, name: str) -> Path:
    """Bring what is behind ``length`` bytes onto the disk, in a new file ``name.cut_<n>`` beside this one.

    Raises:
        OSError: there is no such file then.
    """
    n = 1
    while (aside := path.with_name(f"{name}.cut_{n}")).exists():
        n += 1
    try:
        with path.open("rb") as source, aside.open("xb") as target:
            source.seek(length)
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return aside
