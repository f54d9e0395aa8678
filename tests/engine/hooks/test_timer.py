import re
import time

import pytest

from tests.engine.tiny import AfterStep, Steps
from trainkit.engine.hooks import CallbackHook, IterationTimer


@pytest.fixture
def advance(monkeypatch):
    """Lets the clock go on by some seconds."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return lambda seconds: now.append(now.pop() + seconds)


def timed(advance, *args, **kwargs):
    """Steps of 10, 11, 12, ... s; each hook takes 100 s, also one registered before the timer."""
    trainer = Steps(step=lambda iter: advance(10 + iter))
    slow = [
        AfterStep(lambda trainer: advance(100)),
        CallbackHook(before_train=lambda trainer: advance(7)),
    ]
    trainer.register_hooks(slow)
    trainer.register_hooks(
        [IterationTimer(*args, **kwargs), AfterStep(lambda trainer: advance(100))]
    )
    return trainer


def test_the_time_of_a_step_is_stored_without_hooks_and_the_warm_up_of_a_new_run(advance, caplog):
    caplog.set_level("INFO")
    trainer = timed(advance)
    trainer.train(0, 6)
    assert trainer.storage.history("time").values() == [(12.0, 2), (13.0, 3), (14.0, 4), (15.0, 5)]
    times = re.findall(r"[\d:.]+", caplog.messages[-1])
    # timed iterations, those that are not, in all, each, with hooks
    assert times == ["4", "2", "0:00:54", "13.5000", "0:14:14"]
    trainer.train(6, 9)
    assert trainer.storage.history("time").values()[4:] == [(16.0, 6), (17.0, 7), (18.0, 8)]
    trainer = timed(advance, warmup_iter=0)
    trainer.train(0, 2)
    assert trainer.storage.history("time").values() == [(10.0, 0), (11.0, 1)]


def test_the_summary_is_of_the_timed_steps_and_what_lies_between_them(advance):
    trainer, timer = Steps(step=lambda iter: advance(10 + iter)), IterationTimer()
    trainer.register_hooks([timer, AfterStep(lambda trainer: advance(100))])
    trainer.train(0, 2)
    assert timer.summary() == ""  # warm-up only
    trainer.train(0, 6)
    assert timer.summary().startswith("13.5 s per step")
    assert "waiting for data" not in timer.summary()
    assert "88 % of the run in hooks" in timer.summary()
    # the first two are warm-up
    for iter, data_sec in enumerate([100.0, 100.0, 3.0, 3.0, 3.5, 4.0]):
        trainer.storage.put_scalar("data_time", data_sec, cur_iter=iter)
    assert timer.summary().startswith("13.5 s per step")
    assert "25 % of it waiting for data" in timer.summary()
    assert "88 % of the run in hooks" in timer.summary()
