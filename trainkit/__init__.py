"""A training core for PyTorch: a small loop, hooks, exact checkpoints."""

__version__ = "0.1.0"
