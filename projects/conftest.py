"""The fixtures and settings of the tests of trainkit, for those of the projects."""

import importlib

import pytest

from tests.conftest import *  # noqa: F403


@pytest.fixture
def without_safetensors(monkeypatch):
    """The package cannot be imported."""
    real = importlib.import_module

    def missing(name):
        if name.startswith("safetensors"):
            raise ImportError(f"{name} is hidden by this fixture")
        return real(name)

    monkeypatch.setattr("importlib.import_module", missing)
