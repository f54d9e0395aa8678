"""The estimate of the remaining time, by a clock that the test moves."""

import pytest

from tests.engine.tiny import Steps
from trainkit.engine import HookBase
from trainkit.engine.hooks import IterationTimer, PeriodicWriter, timer
from trainkit.utils.events import EventWriter


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Slow(HookBase):
    """Takes 0.5 s after each step, and 6 s for an evaluation after each fourth one."""

    def __init__(self, clock):
        self._clock = clock

    def before_step(self):
        self._clock.now += 1.0 if self.trainer.iter > 0 else 100.0  # the first one compiles

    def after_step(self):
        self._clock.now += 0.5
        if self.trainer.iter % 4 == 3:
            self._clock.now += 6.0


def test_the_remaining_time_counts_hooks_and_evaluations_but_not_the_first_slow_step(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timer, "time", clock)
    trainer = Steps([IterationTimer(), Slow(clock), PeriodicWriter([], period=9)])
    trainer.train(0, 18)
    [(eta_sec, _), (at_end, _)] = trainer.storage.history("eta_seconds").values()
    # 9 steps of 1 s; in 8 of the 9 before, hooks took 4 s and two evaluations 12 s: 2 s for each step
    assert eta_sec == pytest.approx(27.0)
    assert at_end == 0.0


def test_a_writer_that_shows_progress_is_told_each_iteration():
    calls = []

    class Bar(EventWriter):
        def write(self):
            calls.append("write")

        def show_progress(self, done):
            calls.append(done)

    Steps([PeriodicWriter([Bar()], period=2)]).train(0, 3)
    assert calls == [1, 2, "write", 3, "write", "write"]
