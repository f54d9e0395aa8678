"""A file to which a run appends lines."""

import contextlib
import logging
import os
import shutil
from io import FileIO
from pathlib import Path

from trainkit.utils.run_folder import renew_folders

logger = logging.getLogger(__name__)


class RunFile:
    """A file that grows by whole lines; a resumed run first cuts off the lines that it will write again.

    The file is not changed before the first ``append``. If it is deleted later, it is written again completely.
    """

    def __init__(self, path: str | Path, header: str = "") -> None:
        """``header`` is the first line of a new file."""
        self._path, self._header = Path(path), header
        self._file: FileIO | None = None
        self._pid = 0  # id of the process that has opened it
        self._length: int | None = None  # length of the run's lines; None: the whole file when it is opened

    def append(self, lines: str) -> None:
        """Write all of the lines, or raise OSError and write none of them; a later call may succeed."""
        try:
            was_deleted = self.restore()
            file = self._open()
            # another process may have written; backslashreplace: a name can hold invalid characters
            self._length = file.seek(0, os.SEEK_END)
            rest = memoryview((lines if self._length else self._header + lines).encode(errors="backslashreplace"))
            while rest:
                rest = rest[file.write(rest) :]
            self._length = file.seek(0, os.SEEK_END)
        except OSError:
            self._take_back()
            raise
        if was_deleted:  # last: this log line may go into the same file
            logger.error("%s was deleted during the run; all of it is written again", self._path)

    def restore(self) -> bool:
        """Write a deleted file again from its open descriptor; return whether it was deleted.

        Raises:
            OSError: the file cannot be written.
        """
        if self._file is None:
            return False
        file = self._file
        try:
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                renew_folders()
                self.close()
                logger.warning("%s was replaced by another file; later lines are written to that file", self._path)
            return False
        except FileNotFoundError:
            # in a fork: the process that has opened the file restores it, with these lines too
            if self._pid != os.getpid():
                return False
        renew_folders()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._path.open("xb") as copy:
                while block := os.pread(file.fileno(), 1 << 20, copy.tell()):  # forks share the file's position
                    copy.write(block)
        except FileExistsError:  # a log line has written it while the folder was renewed
            return False
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        self._file = FileIO(self._path, "ab+")
        file.close()
        return True

    def sync(self) -> int:
        """Write the lines to the disk; return the length in bytes, for ``go_on_at``."""
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                logger.error("%s: a power failure may lose its last lines: %s", self._path, error)
        if self._length is None:
            return self._path.stat().st_size if self._path.exists() else 0
        return self._length

    def go_on_at(self, length: int) -> None:
        """At the next ``append``, move everything after ``length`` bytes into a new file in the same folder."""
        self.close()
        self._length = length

    def close(self) -> None:
        """Close the file; later lines are appended to what it contains then."""
        self._length = None
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _open(self) -> FileIO:
        if self._file is None:
            renew_folders()  # raises an error if another run has the folder
        if self._file is None:  # a log line may have opened it
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = FileIO(self._path, "ab+")  # readable, to copy it if it is deleted
            try:
                size = os.fstat(file.fileno()).st_size
                self._length = size if self._length is None else self._cut(file, self._length, size)
            except BaseException:
                file.close()
                raise
            self._file, self._pid = file, os.getpid()
        return self._file

    def _take_back(self) -> None:
        if self._file is not None:
            try:
                self._file.truncate(self._length)
            except OSError:  # the disk of the file may be gone; the next append opens it again
                file, self._file = self._file, None
                with contextlib.suppress(OSError):
                    file.close()

    def _cut(self, file: FileIO, length: int, size: int) -> int:
        if size < length or (length > 0 and os.pread(file.fileno(), 1, length - 1) != b"\n"):
            text = "%s has %d of the %d bytes that this run has written, or other ones; the missing lines are lost"
            logger.warning(text, self._path, size, length)
            length = self._path.read_bytes().rfind(b"\n") + 1 if size < length else 0
        if size > length:
            aside = copy_tail(self._path, length, self._path.name)
            file.truncate(length)
            os.fsync(file.fileno())
            logger.info(
                "%s continues after byte %d; the lines that were there are in %s", self._path, length, aside.name
            )
        return length


def copy_tail(path: Path, length: int, name: str) -> Path:
    """Copy everything after ``length`` bytes to a new file ``name.cut_<n>`` in the same folder, and write it to the
    disk.

    Raises:
        OSError: copying has failed; there is no new file.
    """
    n = 1
    while os.path.lexists(aside := path.with_name(f"{name}.cut_{n}")):
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
