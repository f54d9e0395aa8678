"""The rows of ``tools/benchmark.py``: what is measured against what."""
