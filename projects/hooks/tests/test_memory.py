import pytest
import torch

from tests.engine.tiny import Steps
from trainkit.engine.hooks import TorchMemoryStats


@pytest.fixture
def cuda(monkeypatch):
    """A machine with CUDA, whose peak nobody may reset."""

    def reset():
        raise AssertionError("the peak of other readers is gone")

    readings = {
        "memory_allocated": 1 * 2**20,
        "max_memory_allocated": 2 * 2**20,
        "memory_reserved": 3 * 2**20,
        "max_memory_reserved": 4 * 2**20,
    }
    for name, reading in readings.items():
        monkeypatch.setattr(torch.accelerator.memory, name, lambda reading=reading: reading)
    monkeypatch.setattr(torch.accelerator.memory, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda: "the summary")


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "trainkit.projects.hooks.memory"]


def line(iter):
    return f"Device memory after iteration {iter}: 1 MiB allocated, peak 2; 3 MiB reserved, peak 4"


@pytest.mark.parametrize(
    ("max_iter", "expected"),
    [(20, [line(2), line(5), "\nthe summary"]), (5, [line(2), line(4), "\nthe summary"]), (3, [line(2)])],
)
def test_it_reports_every_period_and_exactly_so_often(cuda, caplog, max_iter, expected):
    caplog.set_level("INFO")
    Steps([TorchMemoryStats(period=3, max_runs=2)]).train(0, max_iter)
    assert messages(caplog) == expected
