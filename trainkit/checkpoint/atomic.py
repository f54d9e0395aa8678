"""Files that are written completely or not at all."""

import contextlib
import errno
import io
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from typing import Any, BinaryIO

_CHUNK = 1 << 20
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.trainkit-tmp")
_being_written: list[str] = []  # names of files and folders, which no thread of this process may remove


class CheckpointError(OSError):
    """A checkpoint cannot be written, found, read or applied; the message names the file and the reason."""


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces ``path`` after the block has succeeded."""
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.trainkit-tmp")
    file: _File | None = None
    with being_written(temporary):
        try:
            file = _File(open(temporary, "xb", buffering=0))  # noqa: SIM115
            with io.BufferedWriter(file, _CHUNK) as output:
                yield output
                output.flush()
                file.sync()
            os.replace(temporary, path)
            sync_folder(folder)
        except OSError as error:
            raise CheckpointError(_write_failure(error, path, temporary, file.size if file else 0)) from error
        finally:
            with contextlib.suppress(OSError):  # the file may have been renamed
                os.remove(temporary)


@contextlib.contextmanager
def being_written(path: str) -> Iterator[None]:
    """Context in which no thread of this process removes this file or folder as a leftover."""
    name = os.path.basename(path)
    _being_written.append(name)
    try:
        yield
    finally:
        _being_written.remove(name)


def is_being_written(name: str) -> bool:
    return name in _being_written


class _File(io.RawIOBase):
    """Writes to a file. After a write that fails, later writes are only counted; :meth:`sync` raises the error.

    If the error were raised at once, torch's writer would hide it behind an error about file positions, and the needed
    size would stay unknown.

    Attributes:
        size: bytes given to ``write``.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._error: BaseException | None = None
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = len(data)
        if self._error is None:
            try:
                count = self._file.write(data)
            except BaseException as error:
                self._error = error
        self.size += count
        return count

    def sync(self) -> None:
        if self._error is not None:
            raise self._error
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        super().close()


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a small text file completely or not at all. Raises CheckpointError if it cannot be written."""
    with replacing(os.fspath(path)) as output:
        output.write(text.encode())


def remove_leftovers(folder: str | os.PathLike[str]) -> None:
    """Remove temporary files of killed processes; no other process may be writing to ``folder``."""
    with contextlib.suppress(OSError):  # leftovers only cost space
        for name in os.listdir(folder):
            if _TEMPORARY.fullmatch(name) and not is_being_written(name):
                os.remove(os.path.join(folder, name))


def sync_folder(folder: str) -> None:
    """Make a rename durable."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot do this
            raise
    finally:
        os.close(descriptor)


_REMEDIES = {
    errno.ENOSPC: "Make room, or keep fewer checkpoints (max_to_keep)",
    errno.EDQUOT: "Remove files, or have your quota raised",
    errno.EFBIG: "Have the limit on the size of a file raised (ulimit -f)",
}


def _write_failure(error: OSError, path: str, temporary: str, size: int) -> str:
    folder = os.path.dirname(temporary)
    text = f"cannot write '{path}' in folder '{folder}': {error.strerror or error}"
    if error.errno in _REMEDIES:
        written = os.path.getsize(temporary) if os.path.exists(temporary) else size
        room = written if written < size else shutil.disk_usage(folder).free  # all is written if fsync or rename fails
        missing = f", so {size - room:,} are missing" if room < size else ""
        text += f"; the file needs {size:,} bytes, there is room for {room:,}{missing}. {_REMEDIES[error.errno]}"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        text += ". Make the folder writable, or choose another one"
    return f"{text}. Checkpoints written before are unchanged"
