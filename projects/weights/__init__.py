"""Weights for other programs, and from other programs."""

from trainkit.projects.weights.pickles import load_trusted_pickle

__all__ = ["load_trusted_pickle"]
