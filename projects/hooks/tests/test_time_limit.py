from types import SimpleNamespace

import pytest

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer


@pytest.fixture
def clock(monkeypatch):
    """A step takes an hour."""
    hours = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: 3600.0 * next(hours))
    monkeypatch.setattr("trainkit.projects.hooks.time_limit.time", clock)


@pytest.mark.parametrize(("max_time", "done"), [("3h", 3), ("150m", 3), ("0.25d", 6), ("1h 3600s", 2), ("1d", 10)])
def test_a_run_stops_at_its_limit_and_is_saved(tmp_path, clock, caplog, max_time, done):
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "MAX_TIME", max_time, "SOLVER.CHECKPOINT_PERIOD", 0))
    caplog.set_level("INFO")
    trainer.train()

    assert (trainer.status, trainer.iter) == ("finished" if done == 10 else "stopped", done)
    if done < 10:
        assert f"Stopped after {done} of 10 iterations: MAX_TIME {max_time} is over" in caplog.messages
        assert (tmp_path / f"model_{done - 1:07d}.pth").exists()


@pytest.mark.parametrize("wrong", ["23", "h", "3x", "0h", "3h later", -1])
def test_what_is_no_time_is_an_error(tmp_path, wrong):
    with pytest.raises(ConfigError, match="MAX_TIME"):
        DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", [{"NAME": "TimeLimit", "MAX_TIME": wrong}]))
