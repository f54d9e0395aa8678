"""The registry of hooks."""

from trainkit.utils.registry import Registry

HOOK_REGISTRY = Registry("HOOK")
"""Hook classes that HOOKS in a config can name; their arguments are plain values, see `ConfiguredHooks`."""
