"""The step as a static graph, for models that are small for their GPU."""

from trainkit.utils.plugins import lending

__getattr__, __dir__ = lending(__name__)
