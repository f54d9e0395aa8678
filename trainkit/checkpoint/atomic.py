"""Files that appear whole or not at all."""

import contextlib
import errno
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
                    size, written = output.size, output.written
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
    """The file object that ``torch.save`` writes to, in blocks that go to the disk at once.

    A failed write is kept for :meth:`commit`, and what follows is only counted: raised at once, it would come out of
    torch's writer as an error about positions in the file, and the size needed would stay unknown.

    Attributes:
        size: bytes handed to ``write``; ``written``: those that the file has taken.
    """

    def __init__(self, path: str) -> None:
        self.size = self.written = 0
        self._error: BaseException | None = None
        self._block, self._filled = memoryview(bytearray(_CHUNK)), 0
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        self.size += len(view)
        try:
            while self._error is None and view:
                count = min(len(view), _CHUNK - self._filled)
                self._block[self._filled : self._filled + count] = view[:count]
                self._filled += count
                view = view[count:]
                if self._filled == _CHUNK:
                    self._write_block()
        except BaseException as error:
            self._error = error
        return len(data)

    def flush(self) -> None:
        """torch.save asks for this method; :meth:`commit` does it."""

    def commit(self) -> None:
        """Bring everything onto the disk, or raise what went wrong."""
        if self._error is not None:
            raise self._error
        self._write_block()
        os.fsync(self._file.fileno())

    def _write_block(self) -> None:
        rest = self._block[: self._filled]
        while rest:
            num_taken = self._file.write(rest)
            self.written += num_taken
            rest = rest[num_taken:]
        self._start_writeback(self._filled)
        self._filled = 0

    def _start_writeback(self, count: int) -> None:
        """Have the system bring the last ``count`` bytes onto the disk now, so that the fsync finds little to do."""
        if hasattr(os, "posix_fadvise"):  # Linux; elsewhere the fsync does it all
            with contextlib.suppress(OSError):  # a file system need not follow an advice
                os.posix_fadvise(self._file.fileno(), self.written - count, count, os.POSIX_FADV_DONTNEED)


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
                with contextlib.suppress(OSError):
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


_NO_ROOM = {  # what there is room for, and the remedy
    errno.ENOSPC: ("{:,} are free", "Make room, or keep fewer checkpoints (max_to_keep)"),
    errno.EDQUOT: ("your quota leaves {:,}", "Remove files, or have the quota raised"),
    errno.EFBIG: ("a file here may have {:,}", "Have the limit on the size of a file raised (ulimit -f)"),
}


def _write_failure(error: OSError, path: str, folder: str, size: int, written: int) -> str:
    text = f"cannot write '{path}' in folder '{folder}': {error.strerror or error}"
    if error.errno in _NO_ROOM:
        room = written if written < size else shutil.disk_usage(folder).free  # fsync and rename fail behind the writing
        there_is, remedy = _NO_ROOM[error.errno]
        text += f"; the file needs {size:,} bytes, {there_is.format(room)}"
        text += f", so {size - room:,} are missing. {remedy}" if room < size else f". {remedy}"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        text += ". Make the folder writable, or choose another one"
    return f"{text}. Checkpoints written before are unchanged"
