"""The error of checkpoints, and the context that raises it for what does not fit."""

import contextlib
from collections.abc import Iterator

from trainkit.utils.errors import ConfigError


class CheckpointError(OSError):
    """A checkpoint cannot be written, found, read or applied.

    The message names the file and the reason.
    """


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Context that loads ``what``, a part of a checkpoint.

    Any error becomes a CheckpointError that names it. A file may come from anybody, and a state
    that does not fit raises errors of any type. A ConfigError and a NotImplementedError stay as
    they are: they are about the config and the program, not the file.
    """
    try:
        yield
    except (ConfigError, NotImplementedError):
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{what} does not fit: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{what} does not fit ({reason})") from error
