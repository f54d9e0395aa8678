"""`instantiate` under its module path in detectron2."""

from typing import Any

from trainkit.utils.loading import load_plugin
from trainkit.utils.plugins import NAMES


def instantiate(cfg: Any) -> Any:
    """Make every call that ``cfg`` describes, inner calls first; a project has the function."""
    return load_plugin(NAMES["instantiate"]).instantiate(cfg)
