import json
import threading

import pytest
import torch

from tests.engine.job import tiny_cfg
from tests.engine.tiny import (
    AfterStep,
    Regression,
    Steps,
    batches,
    fail_at,
    sgd,
    stop_at,
    through_a_file,
)
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import CallbackHook, EvalHook, PeriodicWriter
from trainkit.engine.step import SimpleTrainer
from trainkit.utils import comm
from trainkit.utils.events import CommonMetricPrinter, EventWriter, JSONWriter, get_event_storage


class Log(EventWriter):
    """Notes its calls; it has no room in those with the numbers ``full``, counted from 0."""

    def __init__(self, full=()):
        self.calls, self.full = [], full

    def write(self):
        self.note("write")

    def close(self):
        self.note("close")

    def note(self, call):
        self.calls.append(call)
        if len(self.calls) - 1 in self.full:
            raise OSError("no space left")


def steps(*hooks, asynchronous=False, **kwargs):
    """A loop, whose writers are called by a worker if it is asynchronous."""
    start = (
        CallbackHook(before_train=lambda trainer: trainer.storage.start_worker())
        if asynchronous
        else None
    )
    return Steps([start, *hooks], **kwargs)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_json_has_the_iterations_of_the_period_the_last_one_and_the_final_evaluation(
    tmp_path, asynchronous
):
    path = tmp_path / "metrics.json"

    def make():
        model = Regression()
        trainer = SimpleTrainer(model, batches(5), sgd(model), async_write_metrics=asynchronous)
        trainer.register_hooks(
            [EvalHook(0, lambda: {"top1": 99}), PeriodicWriter([JSONWriter(path)])]
        )
        return trainer

    trainer = make()
    trainer.train(0, 50)
    shorter = path.read_text()
    assert [row["iteration"] for row in rows(path)] == [19, 39, 49, 50]
    assert rows(path)[-1] == {"iteration": 50, "top1": 99.0}
    longer = make()
    longer.load_state_dict(through_a_file(trainer.state_dict()))
    longer.train(50, 70)
    assert path.read_text().startswith(shorter)
    assert [row["iteration"] for row in rows(path)][4:] == [59, 69, 70]


def test_a_failed_run_is_written_up_to_its_end_and_closed(tmp_path):
    path, log = tmp_path / "metrics.json", Log()
    trainer = writing_run(path, PeriodicWriter([log], period=20), step=fail_at(4))
    with pytest.raises(RuntimeError, match="step 4 failed"):
        trainer.train(0, 30)
    assert [(row["iteration"], row["mine"]) for row in rows(path)] == [(2, 1.0), (3, 1.5)]
    assert log.calls == ["write", "close"]


def test_the_remaining_seconds_are_stored_from_the_median_time_until_the_end():
    def put_time(trainer):
        trainer.storage.put_scalar("time", [2.0, 2.0, 90.0, 2.0, 2.0, 2.0][trainer.iter])

    trainer = Steps([AfterStep(put_time), PeriodicWriter([], period=2)])
    trainer.train(0, 6)
    assert trainer.storage.history("eta_seconds").values() == [(8.0, 1), (4.0, 3), (0.0, 5)]


def put_some(trainer):
    trainer.storage.put_scalar("mine", trainer.iter)
    trainer.storage.put_scalar("time", 1.0)
    if trainer.iter % 5 == 4:
        trainer.storage.put_scalar("top1", trainer.iter, smoothing_hint=False)


def writing_run(path, *actions, **kwargs):
    """A trainer that puts something into the storage in each iteration and writes every third one."""
    return steps(
        PeriodicWriter([JSONWriter(path)], period=3), AfterStep(put_some), *actions, **kwargs
    )


@pytest.mark.parametrize(
    ("stop", "in_process", "is_asynchronous"),
    [(1, True, True), (2, False, False), (6, True, False), (6, False, True)],
)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(
    tmp_path, stop, in_process, is_asynchronous
):
    writing_run(tmp_path / "whole.json").train(0, 13)
    path = tmp_path / "metrics.json"
    trainer = writing_run(path, stop_at(stop), asynchronous=is_asynchronous)
    trainer.train(0, 13)
    assert trainer.status == "stopped"
    assert rows(path)[-1]["iteration"] == stop  # for the user to see
    if not in_process:
        state = through_a_file(trainer.state_dict())
        trainer = writing_run(path, asynchronous=is_asynchronous)
        trainer.load_state_dict(state)
    trainer.train(stop + 1, 13)
    assert path.read_text() == (tmp_path / "whole.json").read_text()


def test_nothing_is_cut_off_before_training_begins_nor_by_a_run_from_the_beginning(tmp_path):
    path = tmp_path / "metrics.json"
    first, second = writing_run(path), writing_run(path)
    first.train(0, 4)
    state, before = first.state_dict(), path.read_text()
    again = writing_run(path)
    again.train(0, 7)
    once = path.read_text()
    again.train(0, 7)  # another run has the same iterations
    doubled = path.read_text()
    assert doubled == once + once.removeprefix(before)
    second.load_state_dict(state)
    # a checkpoint before training has them too
    assert second.state_dict()["hooks"] == state["hooks"]
    second.train(0, 1)
    assert path.read_text().startswith(doubled)


def test_lines_after_a_save_in_before_train_are_there_twice_after_a_kill(tmp_path):
    def make():
        trainer = DefaultTrainer(tiny_cfg(tmp_path, "SOLVER.CHECKPOINT_PERIOD", 100))
        trainer.register_hooks([CallbackHook(before_train=lambda t: t.request_save("model_first"))])
        return trainer

    killed = make()
    killed.register_hooks([AfterStep(lambda trainer: trainer.iter == 4 and 1 / 0)])
    with pytest.raises(ZeroDivisionError):
        killed.train()
    resumed = make()
    resumed.resume_or_load()
    resumed.train()
    iterations = [row["iteration"] for row in rows(tmp_path / "metrics.json")]
    assert resumed.start_iter == 0
    assert iterations[:4] == [1, 3, 4, 1]


class Named(EventWriter):
    def __init__(self, name):
        self.name, self.got = name, None

    def write(self):
        pass

    def state_dict(self):
        return {"name": self.name}

    def load_state_dict(self, state):
        self.got = state["name"]


def test_each_writer_gets_the_state_of_its_class_and_place():
    other = type("Other", (Named,), {})
    first = Steps([PeriodicWriter([Named("a"), other("b"), Named("c"), Log()])])
    first.train(0, 1)
    new = [other("x"), Named("y"), Named("z"), Named("w")]
    second = Steps([PeriodicWriter([Log(), *new])])
    second.load_state_dict(first.state_dict())
    second.train(1, 2)
    assert [writer.got for writer in new] == ["b", "a", "c", None]


def test_a_writer_without_room_is_named_and_the_run_goes_on_but_at_the_end_it_has_failed(
    caplog, asynchronous
):
    full, log = Log({1, 2, 5}), Log()
    trainer = steps(PeriodicWriter([full, log], period=1), asynchronous=asynchronous)
    trainer.train(0, 8)
    assert trainer.status == "finished"
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["Log.write failed: no space left"] * 3
    assert full.calls == log.calls == ["write"] * 9 + ["close"]
    trainer = Steps([PeriodicWriter([Log({1}), Log({2})])])
    with pytest.raises(
        OSError,
        match=r"not all of its values are on the disk: Log.write failed: no .*; Log.close fa",
    ):
        trainer.train(0, 3)
    assert trainer.status == "failed"


class Gallery(EventWriter):
    """Notes the images that it sees, and clears them like a writer that is used by itself."""

    def __init__(self):
        self.seen = []

    def write(self):
        storage = get_event_storage()
        self.seen.append(
            [image.iter for image in storage.images()] + [h.iter for h in storage.histograms()]
        )
        storage.clear_images()
        storage.clear_histograms()


def put_picture(trainer):
    trainer.storage.put_image("image", torch.zeros(3, 2, 2))
    if trainer.iter == 2:
        trainer.storage.put_histogram("histogram", torch.ones(1))


def test_every_writer_sees_the_images_and_then_they_are_let_go(asynchronous):
    galleries = [Gallery(), Gallery()]
    steps(
        AfterStep(put_picture), PeriodicWriter(galleries, period=2), asynchronous=asynchronous
    ).train(0, 4)
    assert galleries[0].seen == galleries[1].seen == [[0, 1], [2, 3, 2], []]


def test_images_that_a_stop_has_shown_are_shown_again_when_the_run_goes_on():
    gallery = Gallery()
    trainer = Steps([AfterStep(put_picture), stop_at(4), PeriodicWriter([gallery], 3)])
    trainer.train(0, 8)
    trainer.train(trainer.iter, 8)
    assert gallery.seen == [[0, 1, 2, 2], [3, 4], [3, 4, 5], [6, 7], []]


def test_results_of_any_evaluation_are_written_before_the_next_one(tmp_path):
    path, results = tmp_path / "metrics.json", iter(range(10))
    hook = EvalHook(2, lambda: {"result": next(results)}, eval_at_start=True)
    Steps([hook, PeriodicWriter([JSONWriter(path)], period=100)]).train(0, 7)
    assert [(row["iteration"], row["result"]) for row in rows(path)] == [
        (0, 0),
        (1, 1),
        (3, 2),
        (5, 3),
        (7, 4),
    ]


def test_a_worker_that_is_at_most_one_period_behind_is_not_waited_for():
    release, waited = threading.Event(), []

    def before_step(trainer):
        trainer.storage.start_worker()
        if trainer.iter == 4:
            trainer.storage.publish(lambda: waited.append(release.wait(120)))
        if trainer.iter == 11:
            assert waited == []  # the worker still stands in iteration 4
            release.set()

    trainer = Steps([CallbackHook(before_step=before_step), PeriodicWriter([], period=4)])
    trainer.train(0, 12)
    assert waited == [True]


def test_the_last_line_of_a_run_that_finishes_early_counts_the_iterations_that_were_done(caplog):
    caplog.set_level("INFO", "trainkit.utils.events")
    hooks = [
        stop_at(4, finished=True),
        PeriodicWriter([CommonMetricPrinter(8, iters_per_epoch=5)], period=3),
    ]
    Steps(hooks, lambda iter: get_event_storage().put_scalar("a", 1.0)).train(0, 8)
    assert "epoch 1/2  after 5/8" in caplog.messages[-1]


def test_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(comm, "is_main_process", lambda: False)
    path = tmp_path / "metrics.json"
    trainer = writing_run(path)
    trainer.train(0, 6)
    assert not path.exists()
    assert trainer.storage.history("mine").latest() == 5.0
