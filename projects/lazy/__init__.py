"""Configs written in Python, with calls that are made later."""

from trainkit.projects.lazy.config import LazyCall, LazyConfig
from trainkit.projects.lazy.instantiate import instantiate

__all__ = ["LazyCall", "LazyConfig", "instantiate"]
