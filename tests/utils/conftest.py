"""Fixtures for tests of writers."""

import itertools
import time
from types import SimpleNamespace

import pytest


@pytest.fixture
def seconds(monkeypatch):
    """Each file of events starts in a second of its own, as with processes: its name has to tell the order."""
    clock = itertools.count(1_700_000_000)
    time_of_files = SimpleNamespace(time=lambda: next(clock), sleep=time.sleep)
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", time_of_files)
