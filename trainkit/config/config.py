"""Placeholder while the config area is built."""

from fvcore.common.config import CfgNode  # noqa: F401
