"""The place of names that projects lend."""

from trainkit.utils.plugins import lending

__getattr__, __dir__ = lending(__name__)
