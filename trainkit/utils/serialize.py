"""The place of a name that a project has."""

from trainkit.utils.loading import lazy_names

__getattr__ = lazy_names(__name__, "PicklableWrapper")
