"""A marker of pytest, for tests that train a job several times."""

from typing import Any


def pytest_configure(config: Any) -> None:
    """Called by pytest if this is one of its plug-ins."""
    config.addinivalue_line(
        "markers", "exact: trains a job several times; -m 'not exact' leaves such tests out"
    )
