"""Checkpoints without frozen parameters, such as those of adapters."""
