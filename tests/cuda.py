"""Tests that need a CUDA device; `tests/fake_cuda` runs them where there is none."""

import warnings
from contextlib import contextmanager

import pytest
import torch


def needs_cuda(test):
    """Mark a test, or a class of them."""
    return pytest.mark.cuda(
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test)
    )


def forbid_waiting(mode="error"):
    """From here on it is an error if the host waits for the device, but for an event; `allow_waiting` ends it."""
    with warnings.catch_warnings():  # torch says once that it does not see everything
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


def allow_waiting():
    forbid_waiting("default")


@contextmanager
def host_never_waits():
    """Within it, it is an error if the host waits for the device, but for an event."""
    try:
        forbid_waiting()
        yield
    finally:
        allow_waiting()
