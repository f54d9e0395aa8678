"""Single files at addresses of fsspec, such as ``s3://bucket/file``."""

import importlib
import os
import secrets
from typing import Any

from iopath.common.file_io import PathHandler, get_cache_dir

from trainkit.utils.file_io import PathManager


def open_address(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it.

    Raises:
        ImportError: the package for this kind of address is missing.
        ValueError: fsspec does not know this kind of address.
    """
    filesystem, path = importlib.import_module("fsspec.core").url_to_fs(address)
    return filesystem, path


class FsspecHandler(PathHandler):
    """Reads and writes files at addresses of fsspec; a file is downloaded again if it has changed at its address."""

    def _get_supported_prefixes(self) -> list[str]:
        kinds = ["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hdfs", "webhdfs", "hf", "sftp", "smb", "memory"]
        return [f"{kind}://" for kind in kinds]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        filesystem, remote = open_address(path)
        folder = os.path.join(get_cache_dir(), "fsspec", filesystem.ukey(remote))
        local = os.path.join(folder, os.path.basename(remote))
        if force or not os.path.exists(local):
            os.makedirs(folder, exist_ok=True)
            temporary = f"{local}.{secrets.token_hex(4)}"
            filesystem.get_file(remote, temporary)
            os.replace(temporary, local)
        return local

    def _copy_from_local(self, local_path: str, dst_path: str, overwrite: bool = False, **kwargs: Any) -> bool:
        filesystem, remote = open_address(dst_path)
        filesystem.put_file(local_path, remote)
        return True


def register_addresses(path_manager: Any = PathManager) -> None:
    """Let ``path_manager`` open addresses of fsspec."""
    path_manager.register_handler(FsspecHandler(), allow_override=True)
