"""Single files at addresses of fsspec, such as ``s3://bucket/file``."""

import importlib
import os
import secrets
from typing import Any

from iopath.common.file_io import get_cache_dir


def open_address(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it.

    Raises:
        ImportError: the package for this kind of address is missing.
        ValueError: fsspec does not know this kind of address.
    """
    filesystem, path = importlib.import_module("fsspec.core").url_to_fs(address)
    return filesystem, path


def download_address(address: str, force: bool = False) -> str:
    """The local path of the file, which is downloaded again if it has changed at its address, or by ``force``."""
    filesystem, path = open_address(address)
    folder = os.path.join(get_cache_dir(), "fsspec", filesystem.ukey(path))
    local = os.path.join(folder, os.path.basename(path))
    if force or not os.path.exists(local):
        os.makedirs(folder, exist_ok=True)
        temporary = f"{local}.{secrets.token_hex(4)}"
        filesystem.get_file(path, temporary)
        os.replace(temporary, local)
    return local


def upload_address(local: str, address: str) -> None:
    """Copy a local file to the address."""
    filesystem, path = open_address(address)
    filesystem.put_file(local, path)
