"""Tests for your own job: does it resume exactly, and does it depend on the number of workers?

``docs/testing.md`` shows them. With ``pytest_plugins = ["trainkit.testing"]`` in a conftest.py,
pytest knows the marker ``exact`` for such tests.
"""

from trainkit.testing.exact import assert_resumes_exactly, assert_same_on_any_workers
from trainkit.testing.marker import pytest_configure as pytest_configure

__all__ = ["assert_resumes_exactly", "assert_same_on_any_workers"]
