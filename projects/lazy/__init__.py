"""Configs written in Python, with calls that are made later."""

from trainkit.projects.lazy.config import LazyCall, LazyConfig, instantiate

__all__ = ["LazyCall", "LazyConfig", "instantiate"]
