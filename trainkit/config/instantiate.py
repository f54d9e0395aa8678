"""`instantiate` under its module path in detectron2."""

from typing import Any

from trainkit.utils.plugins import load


def instantiate(cfg: Any) -> Any:
    """Make every call that ``cfg`` describes, inner calls first; a project has the function."""
    return load("instantiate")(cfg)
