"""Files by path or address."""

import os
import stat

from iopath.common.file_io import HTTPURLHandler
from iopath.common.file_io import PathHandler as PathHandler  # from here too, as in detectron2
from iopath.common.file_io import PathManager as _PathManager

PathManager = _PathManager()
"""Opens local paths, and http(s) and ftp addresses; others by handlers that projects register."""

PathManager.register_handler(HTTPURLHandler())


def refuse_pipe(path: str | os.PathLike[str]) -> None:
    """Raises OSError if the file is a pipe.

    To open one may wait for ever, and only one process can read it.
    """
    if stat.S_ISFIFO(os.stat(path).st_mode):
        raise OSError("it is a pipe, which only one process can read; write it to a file")
