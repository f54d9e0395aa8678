"""Checkpoints without frozen parameters, such as those of adapters."""

from trainkit.projects.trainable_only.frozen import FrozenWeights

__all__ = ["FrozenWeights"]
