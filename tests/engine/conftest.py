"""Asynchronous metrics as on CUDA, where the loop does not look at them before the update."""

import pytest

from tests.engine.tiny import metrics_by_worker


@pytest.fixture
def worker():
    """Asynchronous metrics are looked at by the worker alone."""
    with metrics_by_worker():
        yield


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def asynchronous(request):
    """Once without, and once with the worker."""
    with metrics_by_worker():
        yield request.param
