"""Files that appear whole or not at all."""

import contextlib
import errno
import io
import os
import re
import secrets
import shutil
from collections.abc import Iterator

_CHUNK = 1 << 20
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.trainkit-tmp")
_being_written: list[str] = []  # names of this process's temporary files, which no thread of it may remove


class CheckpointError(OSError):
    """A checkpoint cannot be written, found, read or applied; the message names the file and the reason."""


@contextlib.contextmanager
def replacing(path: str) -> "Iterator[Output]":
    """Yield a temporary file that takes the place of ``path`` once the block has succeeded."""
    folder, name = os.path.split(os.path.abspath(path))
    temporary_name = f".{name}.{secrets.token_hex(4)}.trainkit-tmp"
    temporary = os.path.join(folder, temporary_name)
    size = written = 0
    _being_written.append(temporary_name)
    try:
        try:
            with Output(temporary) as output:
                try:
                    yield output
                    output.commit()
                finally:
                    size, written = output.size, os.path.getsize(temporary)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(_write_failure(error, path, folder, size, written)) from error
    finally:
        _being_written.remove(temporary_name)


class Output:
    """The file object that ``torch.save`` writes to.

    A failed write is kept for :meth:`commit`, and what follows is only counted: raised at once, it would come out of
    torch's writer as an error about positions in the file, and the size needed would stay unknown.

    Attributes:
        size: bytes handed to ``write``.
    """

    def __init__(self, path: str) -> None:
        self.size = 0
        self._error: BaseException | None = None
        self._raw = open(path, "xb", buffering=0)  # noqa: SIM115
        self._file = io.BufferedWriter(self._raw, _CHUNK)

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what a failed write has left in the buffer
            self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        self.size += len(data)
        if self._error is None:
            try:
                self._file.write(data)
            except BaseException as error:
                self._error = error
        return len(data)

    def flush(self) -> None:
        """torch.save asks for this method; :meth:`commit` does it."""

    def commit(self) -> None:
        """Bring everything onto the disk, or raise what went wrong."""
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._raw.fileno())


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a small text file in the same all-or-nothing way.

    Raises:
        CheckpointError: it cannot be written.
    """
    with replacing(os.fspath(path)) as output:
        output.write(text.encode())


def remove_leftovers(folder: str | os.PathLike[str]) -> None:
    """Remove the temporary files of writers that were killed; no other process may be writing to ``folder``."""
    with contextlib.suppress(OSError):  # they cost space, no more
        for name in os.listdir(folder):
            if _TEMPORARY.fullmatch(name) and name not in _being_written:
                os.remove(os.path.join(folder, name))


def sync_folder(folder: str) -> None:
    """Make a rename durable."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


_REMEDIES = {
    errno.ENOSPC: "Make room, or keep fewer checkpoints (max_to_keep)",
    errno.EDQUOT: "Remove files, or have your quota raised",
    errno.EFBIG: "Have the limit on the size of a file raised (ulimit -f)",
}


def _write_failure(error: OSError, path: str, folder: str, size: int, written: int) -> str:
    text = f"cannot write '{path}' in folder '{folder}': {error.strerror or error}"
    if error.errno in _REMEDIES:
        room = written if written < size else shutil.disk_usage(folder).free  # fsync and rename fail after the writing
        missing = f", so {size - room:,} are missing" if room < size else ""
        text += f"; the file needs {size:,} bytes, there is room for {room:,}{missing}. {_REMEDIES[error.errno]}"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        text += ". Make the folder writable, or choose another one"
    return f"{text}. Checkpoints written before are unchanged"
