"""Runs whose folder is an address of fsspec, such as ``s3://bucket/run``."""

from trainkit.projects.remote.mirror import Mirror
from trainkit.projects.remote.store import STORE_REGISTRY, CheckpointStore

__all__ = ["STORE_REGISTRY", "CheckpointStore", "Mirror"]
