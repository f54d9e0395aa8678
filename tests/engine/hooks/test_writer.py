import json

import pytest

from tests.engine.tiny import AfterStep, Regression, Steps, batches, fail_at, sgd
from trainkit.engine.hooks import EvalHook, PeriodicWriter
from trainkit.engine.trainers import SimpleTrainer
from trainkit.utils.events import EventWriter, JSONWriter


class Log(EventWriter):
    def __init__(self, fails=False):
        self.calls = []
        self.fails = fails

    def write(self):
        self.calls.append("write")

    def close(self):
        self.calls.append("close")
        if self.fails:
            raise OSError("no space left")


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_metrics_json_has_the_iterations_of_the_period_the_last_one_and_the_final_evaluation(tmp_path, asynchronous):
    path = tmp_path / "metrics.json"
    model = Regression()
    trainer = SimpleTrainer(model, batches(5), sgd(model), async_write_metrics=asynchronous)
    trainer.register_hooks([EvalHook(0, lambda: {"top1": 99}), PeriodicWriter([JSONWriter(path)])])
    trainer.train(0, 50)
    assert [row["iteration"] for row in rows(path)] == [19, 39, 49, 50]
    assert rows(path)[-1] == {"iteration": 50, "top1": 99.0}


def test_what_a_hook_registered_later_puts_is_written_too(tmp_path):
    path = tmp_path / "metrics.json"
    trainer = Steps([PeriodicWriter([JSONWriter(path)], period=2)])
    trainer.register_hooks([EvalHook(4, lambda: {"top1": trainer.iter}), AfterStep(put_iter)])
    trainer.train(0, 7)
    assert rows(path) == [
        {"iteration": 1, "mine": 0.5},
        {"iteration": 3, "mine": 1.5, "top1": 3},
        {"iteration": 5, "mine": 2.5},
        {"iteration": 6, "mine": 3.0},
        {"iteration": 7, "top1": 7.0},
    ]


def put_iter(trainer):
    trainer.storage.put_scalar("mine", trainer.iter)


def test_writers_write_each_period_after_the_last_step_and_at_the_end_in_each_run():
    log = Log()
    trainer = Steps([PeriodicWriter([log], period=3)])
    trainer.train(0, 7)
    assert log.calls == ["write", "write", "write", "write", "close"]
    trainer.train(0, 3)
    assert log.calls[5:] == ["write", "write", "close"]


def test_a_failed_run_is_written_up_to_its_end_and_closed(tmp_path):
    path = tmp_path / "metrics.json"
    log = Log()
    trainer = Steps([PeriodicWriter([log, JSONWriter(path)], period=20), AfterStep(put_iter)], step=fail_at(5))
    with pytest.raises(RuntimeError, match="step 5 failed"):
        trainer.train(0, 30)
    assert rows(path) == [{"iteration": 4, "mine": 2.0}]
    assert log.calls == ["write", "close"]


def test_the_second_of_two_runs_goes_on_in_the_same_file(tmp_path):
    path = tmp_path / "metrics.json"
    trainer = Steps([PeriodicWriter([JSONWriter(path)], period=2), AfterStep(put_iter)])
    trainer.train(0, 2)
    trainer.train(2, 4)
    assert rows(path) == [{"iteration": 1, "mine": 0.5}, {"iteration": 3, "mine": 2.5}]


def test_a_writer_that_cannot_be_closed_leaves_the_others_closed():
    first, second = Log(fails=True), Log()
    trainer = Steps([PeriodicWriter([first, second])])
    with pytest.raises(OSError, match="no space left"):
        trainer.train(0, 1)
    assert first.calls[-1] == second.calls[-1] == "close"


def test_the_remaining_seconds_are_stored_from_the_median_time_until_the_end():
    def put_time(trainer):
        trainer.storage.put_scalar("time", [2.0, 2.0, 90.0, 2.0, 2.0, 2.0][trainer.iter])

    trainer = Steps([AfterStep(put_time), PeriodicWriter([], period=2)])
    trainer.train(0, 6)
    assert trainer.storage.history("eta_seconds").values() == [(8.0, 1), (4.0, 3), (0.0, 5)]


def test_bad_arguments_are_errors_of_the_constructor():
    with pytest.raises(TypeError, match=r"writers must be EventWriter objects, got 'metrics\.json'"):
        PeriodicWriter(["metrics.json"])
    with pytest.raises(ValueError, match="period must be a whole number of iterations >= 1, got 0"):
        PeriodicWriter([], period=0)
