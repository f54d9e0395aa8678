import time

import pytest

from tests.engine.tiny import AfterStep, Steps, fail_at
from trainkit.engine.hooks import CallbackHook, IterationTimer


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def advance(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def timed(clock, *args, **kwargs):
    """Steps of 10, 11, 12, ... s; each hook takes 100 s, also one registered before the timer."""
    trainer = Steps(step=lambda iter: clock.advance(10 + iter))
    slow = [AfterStep(lambda trainer: clock.advance(100)), CallbackHook(before_train=lambda trainer: clock.advance(7))]
    trainer.register_hooks(slow)
    trainer.register_hooks([IterationTimer(*args, **kwargs), AfterStep(lambda trainer: clock.advance(100))])
    return trainer


def test_the_time_of_a_step_is_stored_without_hooks_and_warm_up(clock, caplog):
    caplog.set_level("INFO")
    trainer = timed(clock)
    trainer.train(0, 6)
    assert trainer.storage.history("time").values() == [(12.0, 2), (13.0, 3), (14.0, 4), (15.0, 5)]
    assert caplog.messages[-1] == "4 iterations in 0:00:54 (13.5000 s each); with hooks 0:14:14"


def test_as_in_detectron2_the_warm_up_ends_before_the_iteration_of_its_number(clock):
    trainer = timed(clock, warmup_iter=3)
    trainer.train(0, 50)
    assert len(trainer.storage.history("time").values()) == 48


def test_a_second_run_and_a_resumed_one_warm_up_again(clock, caplog):
    caplog.set_level("INFO")
    trainer = timed(clock, warmup_iter=2)
    trainer.train(0, 3)
    trainer.train(3, 5)
    assert trainer.storage.history("time").values() == [(14.0, 4)]
    assert caplog.messages[-1] == "1 iterations in 0:00:14 (14.0000 s each); with hooks 0:03:34"


@pytest.mark.parametrize("warmup_iter", [0, 1])
def test_without_warm_up_the_first_step_counts(clock, warmup_iter):
    trainer = timed(clock, warmup_iter=warmup_iter)
    trainer.train(0, 2)
    assert trainer.storage.history("time").values() == [(10.0, 0), (11.0, 1)]


class Epochs(Steps):
    iters_per_epoch = 3


def epochs(clock, fail=-1):
    """Steps of 10, 11, 12, ... s and a hook of 100 s behind each; an epoch has three of them."""

    def step(iter):
        clock.advance(10 + iter)
        fail_at(fail)(iter)

    return Epochs([IterationTimer(), AfterStep(lambda trainer: clock.advance(100))], step=step)


def test_the_time_of_an_epoch_is_from_its_first_step_to_its_last_with_the_hooks_between(clock):
    trainer = epochs(clock)
    trainer.train(0, 8)
    assert trainer.storage.history("epoch_time").values() == [(233.0, 2), (242.0, 5)]
    assert trainer.storage.smoothing_hints()["epoch_time"] is False


def test_an_epoch_that_the_run_has_not_done_as_a_whole_has_no_time(clock):
    trainer = epochs(clock)
    trainer.train(1, 6)  # resumed inside the first epoch
    assert trainer.storage.history("epoch_time").values() == [(242.0, 5)]
    trainer.train(0, 2)
    trainer.train(2, 3)
    assert "epoch_time" not in trainer.storage.latest()


def test_an_epoch_in_which_a_step_failed_has_no_time_when_the_run_goes_on(clock):
    trainer = epochs(clock, fail=4)
    with pytest.raises(RuntimeError, match="step 4 failed"):
        trainer.train(0, 9)
    trainer.step = lambda iter: clock.advance(10)
    trainer.train(4, 9)
    assert trainer.storage.history("epoch_time").values() == [(230.0, 8)]


def test_the_summary_is_of_the_timed_steps_and_what_lies_between_them(clock):
    trainer, timer = Steps(step=lambda iter: clock.advance(10 + iter)), IterationTimer()
    trainer.register_hooks([timer, AfterStep(lambda trainer: clock.advance(100))])
    trainer.train(0, 6)
    in_hooks = "88 % of the run in hooks"
    assert timer.summary() == f"13.5 s per step; {in_hooks}"
    for iter, data_sec in enumerate([100.0, 100.0, 3.0, 3.0, 3.5, 4.0]):  # the first two are warm-up
        trainer.storage.put_scalar("data_time", data_sec, cur_iter=iter)
    assert timer.summary() == f"13.5 s per step, 25 % of it waiting for data; {in_hooks}"


def test_a_run_of_warm_up_only_has_no_summary(clock):
    trainer, timer = Steps(), IterationTimer()
    trainer.register_hooks([timer])
    trainer.train(0, 2)
    assert timer.summary() == ""
