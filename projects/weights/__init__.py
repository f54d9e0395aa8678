"""Weights for other programs, and from other programs."""
