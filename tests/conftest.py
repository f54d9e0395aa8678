"""Settings of the whole suite."""

import pytest
import torch

from trainkit.engine.metrics import StepRecord

# tiny models only lose by more threads, most of all when something else runs on the machine
torch.set_num_threads(1)


def pytest_configure(config):
    """Files run in their order: by the number of its tests a file with a few long ones would be the last."""
    if hasattr(config.option, "loadscopereorder"):  # of pytest-xdist
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """The longest files first: at the end one of them would keep one worker while the others have nothing left."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/tools/"))


_is_under_way = StepRecord.is_under_way


@pytest.fixture(scope="session", autouse=True)
def _as_on_an_accelerator():
    """What asks for asynchronous metrics gets the worker, to which one process on a CPU hands nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRecord, "is_under_way", lambda record: True)
        yield


@pytest.fixture
def as_it_is(monkeypatch):
    """Without that."""
    monkeypatch.setattr(StepRecord, "is_under_way", _is_under_way)
