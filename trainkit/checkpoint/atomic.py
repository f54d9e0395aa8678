"""Files that are written completely or not at all."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trainkit.checkpoint.errors import CheckpointError

_SUFFIX = ".trainkit-tmp"
_being_written: list[str] = []  # names of temporary files of this process


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces ``path`` after the block has succeeded.

    Raises CheckpointError. `sync_folder` makes the rename durable: until then, a power failure may
    bring the old file back.
    """
    folder, name = os.path.split(path)
    own_name = f".{name}.{os.urandom(4).hex()}{_SUFFIX}"
    temporary = os.path.join(folder, own_name)
    _being_written.append(own_name)
    try:
        with open(temporary, "wb", buffering=1 << 20) as output:
            yield output
            output.flush()
            os.fsync(output.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        reason: BaseException | None = error
        while isinstance(reason, RuntimeError):  # torch's writer raises it after an OSError
            reason = reason.__context__
        if isinstance(reason, OSError):
            raise CheckpointError(
                f"cannot write '{path}': {reason.strerror or reason}; the old file stays"
            ) from reason
        raise
    finally:
        _being_written.remove(own_name)


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a small text file completely or not at all.

    Raises CheckpointError if it cannot be written.
    """
    with replacing(path) as output:
        output.write(text.encode())


def remove_leftovers(folder: str) -> None:
    """Remove temporary files of killed processes; no other process may be writing to ``folder``."""
    with contextlib.suppress(OSError):  # they only cost space
        for path in Path(folder).glob(f".*{_SUFFIX}"):
            if path.name not in _being_written:
                path.unlink()


def sync_folder(folder: str) -> None:
    """Make the renames in a folder durable. Raises CheckpointError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems cannot do this
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):
            raise CheckpointError(f"cannot write '{folder}': {error.strerror}") from error
    finally:
        os.close(descriptor)
