"""Runs whose folder is an address of fsspec, such as ``s3://bucket/run``."""

from trainkit.utils.plugins import lending

__getattr__, __dir__ = lending(__name__)
