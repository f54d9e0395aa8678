"""Helpers for tests of configs."""

import os
import tempfile
from typing import Any

from trainkit.projects.lazy.config import LazyConfig


def reload_lazy_config(cfg: Any) -> Any:
    """Save a config with ``LazyConfig.save`` and load it again."""
    with tempfile.TemporaryDirectory() as folder:
        LazyConfig.save(cfg, os.path.join(folder, "config.yaml"))
        return LazyConfig.load(os.path.join(folder, "config.yaml"))
