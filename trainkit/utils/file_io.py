"""Files by path or address."""

from typing import Any

from iopath.common.file_io import HTTPURLHandler
from iopath.common.file_io import PathHandler as PathHandler  # from here too, as in detectron2
from iopath.common.file_io import PathManager as _PathManager

from trainkit.utils.plugins import NAMES, load_plugin

__all__ = ["PathManager"]


class _Addresses(PathHandler):
    """Addresses of fsspec: the project that knows them is imported when one is used."""

    def _get_supported_prefixes(self) -> list[str]:
        kinds = ["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hdfs", "webhdfs", "hf", "sftp", "smb", "memory"]
        return [f"{kind}://" for kind in kinds]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        return str(load_plugin(NAMES["download_address"]).download_address(path, force))

    def _copy_from_local(self, local_path: str, dst_path: str, overwrite: bool = False, **kwargs: Any) -> bool:
        load_plugin(NAMES["upload_address"]).upload_address(local_path, dst_path)
        return True


PathManager = _PathManager()
"""Opens local paths, addresses of fsspec, and http(s) and ftp addresses; a project can register further handlers."""

PathManager.register_handler(HTTPURLHandler())
PathManager.register_handler(_Addresses())
