"""Train models that were not written for trainkit."""

from trainkit.projects.adapters.logits import losses_from

__all__ = ["losses_from"]
