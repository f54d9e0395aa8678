"""A CPU has no use for the worker that stores metrics on CUDA; tests that are about it ask for it."""

import pytest

from tests.engine.tiny import metrics_by_worker


@pytest.fixture
def worker():
    """Asynchronous metrics are stored by the worker."""
    with metrics_by_worker():
        yield


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def asynchronous(request):
    """Once without, and once with the worker."""
    with metrics_by_worker():
        yield request.param
