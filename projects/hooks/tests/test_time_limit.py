from types import SimpleNamespace

import pytest
from trainkit.projects.hooks.time_limit import parse_time

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer


@pytest.fixture
def clock(monkeypatch):
    """A step takes an hour."""
    hours = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: 3600.0 * next(hours))
    monkeypatch.setattr("trainkit.projects.hooks.time_limit.time", clock)


def test_a_run_stops_at_its_limit_and_is_saved(tmp_path, clock, caplog):
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "MAX_TIME", "3h", "SOLVER.CHECKPOINT_PERIOD", 0))
    caplog.set_level("INFO")
    trainer.train()

    assert (trainer.status, trainer.iter) == ("stopped", 3)
    assert "Stopped after 3 of 10 iterations: MAX_TIME 3h is over" in caplog.messages
    assert (tmp_path / "model_0000002.pth").exists()


def test_times_have_units_and_other_texts_are_errors():
    assert [parse_time(text) for text in ("150m", "0.25d", "1h 3600s")] == [9000, 21600, 7200]
    for wrong in ("23", "h", "3x", "0h", "3h later", -1):
        with pytest.raises(ConfigError, match="MAX_TIME"):
            parse_time(wrong)
