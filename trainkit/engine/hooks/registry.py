"""Hooks by name."""

from trainkit.utils.registry import Registry

HOOK_REGISTRY = Registry("HOOK")
"""Hook classes that HOOKS of a config can name; their arguments are plain values, see `ConfiguredHooks`."""
