"""The fixtures and settings of the tests of trainkit, for those of the projects."""

import sys

import pytest

from tests.conftest import *  # noqa: F403


@pytest.fixture
def without_safetensors(monkeypatch):
    """The package cannot be imported."""
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
