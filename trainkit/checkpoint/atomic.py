"""Files that are written completely or not at all."""

import contextlib
import errno
import os
import re
import secrets
import sys
from collections.abc import Iterator
from typing import BinaryIO

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.trainkit-tmp")
_being_written: list[str] = []  # names of files and folders, which no thread of this process may remove
_UNWRITABLE = ". Make the folder writable, or choose another one"
_REMEDIES = {
    errno.ENOSPC: ". Make room, or keep fewer checkpoints (max_to_keep)",
    errno.EDQUOT: ". Remove files, or have your quota raised",
    errno.EFBIG: ". Have the limit on the size of a file raised (ulimit -f)",
    errno.EROFS: _UNWRITABLE,
    errno.EACCES: _UNWRITABLE,
    errno.EPERM: _UNWRITABLE,
}


class CheckpointError(OSError):
    """A checkpoint cannot be written, found, read or applied; the message names the file and the reason."""


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces ``path`` after the block has succeeded."""
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.trainkit-tmp")
    outer = sys.exc_info()[1]  # this may be called while another error is handled
    with being_written(temporary):
        try:
            with open(temporary, "xb", buffering=1 << 20) as output:
                yield output
                output.flush()
                os.fsync(output.fileno())
            os.replace(temporary, path)
            sync_folder(folder)
        except Exception as failure:
            error = _cause(failure, outer)
            if not isinstance(error, OSError):
                raise error from None
            reason = f"{error.strerror or error}{_REMEDIES.get(error.errno or 0, '')}"
            raise CheckpointError(
                f"cannot write '{path}' in folder '{folder}': {reason}. Checkpoints written before are unchanged"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # the file may have been renamed
                os.remove(temporary)


def _cause(error: BaseException, outer: BaseException | None) -> BaseException:
    """The error of a write, which torch's writer hides behind an error about positions in the file."""
    found: BaseException | None = error
    while isinstance(found, Exception) and not isinstance(found, OSError):
        found = None if found.__context__ is outer else found.__context__
    return found or error


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
