"""Files by path or address."""

from iopath.common.file_io import HTTPURLHandler
from iopath.common.file_io import PathHandler as PathHandler  # from here too, as in detectron2
from iopath.common.file_io import PathManager as _PathManager

PathManager = _PathManager()
"""Opens local paths, and http(s) and ftp addresses; others by handlers that projects register."""

PathManager.register_handler(HTTPURLHandler())
