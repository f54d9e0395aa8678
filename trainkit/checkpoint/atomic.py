"""Files that are written completely or not at all."""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from typing import BinaryIO

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.trainkit-tmp")
_being_written: list[str] = []  # names of temporary files, which no thread of this process may remove


class CheckpointError(OSError):
    """A checkpoint cannot be written, found, read or applied; the message names the file and the reason."""


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Context in which an OSError becomes a CheckpointError that names ``path``."""
    try:
        yield
    except (OSError, RuntimeError) as failure:
        error: BaseException | None = failure
        while error is not None and not isinstance(error, OSError):  # torch's writer raises a RuntimeError after it
            error = error.__context__
        if error is None:
            raise
        reason = error.strerror or error
        raise CheckpointError(f"cannot write '{path}': {reason}. Checkpoints written before are unchanged") from error


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces ``path`` after the block has succeeded. Raises CheckpointError."""
    folder, name = os.path.split(os.path.abspath(path))
    temporary = f".{name}.{secrets.token_hex(4)}.trainkit-tmp"
    _being_written.append(temporary)
    try:
        with writing(path):
            with open(os.path.join(folder, temporary), "xb", buffering=1 << 20) as output:
                yield output
                output.flush()
                os.fsync(output.fileno())
            os.replace(os.path.join(folder, temporary), path)
            sync_folder(folder)
    finally:
        with contextlib.suppress(OSError):  # the file may have been renamed
            os.remove(os.path.join(folder, temporary))
        _being_written.remove(temporary)


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a small text file completely or not at all. Raises CheckpointError if it cannot be written."""
    with replacing(os.fspath(path)) as output:
        output.write(text.encode())


def remove_leftovers(folder: str) -> None:
    """Remove temporary files of killed processes; no other process may be writing to ``folder``."""
    with contextlib.suppress(OSError):  # leftovers only cost space
        for name in os.listdir(folder):
            if _TEMPORARY.fullmatch(name) and name not in _being_written:
                os.remove(os.path.join(folder, name))


def sync_folder(folder: str) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot do this
            raise
    finally:
        os.close(descriptor)
