"""The rows of ``tools/benchmark.py``."""
