import contextlib
import functools
import gc
import json
import logging
import signal
import threading
import weakref

import pytest
import torch

from tests.engine.tiny import Regression, Weight, batches, sgd
from trainkit.engine.hook_base import HookBase, Priority
from trainkit.engine.hooks import CallbackHook, IterationTimer, PeriodicWriter
from trainkit.engine.loop import TrainerBase
from trainkit.engine.step import SimpleTrainer
from trainkit.utils.events import EventWriter, JSONWriter, get_event_storage, has_event_storage

POINTS = ["before_train", "before_step", "after_backward", "after_step", "after_train"]


class Trainer(TrainerBase):
    """Does nothing in a step but call ``after_backward``, and fails where it is told to."""

    def __init__(self, hooks=(), fail_at=None, error=None):
        super().__init__()
        self.fail_at, self.error = fail_at, error or RuntimeError("step failed")
        self.register_hooks(hooks)

    def run_step(self):
        if self.iter == self.fail_at:
            raise self.error
        self.after_backward()


class Spy(HookBase):
    """Notes what it sees at every point, and does something at one of them."""

    def __init__(self, calls, note, point=None, do=None):
        self._calls, self._note, self._point, self._do = calls, note, point, do

        for name in POINTS:
            setattr(self, name, functools.partial(self._at, name))

    def _at(self, point):
        self._calls.append((point, *self._note(self.trainer)))
        if point == self._point:
            self._do(self.trainer)


def iter_and_status(trainer):
    return trainer.iter, trainer.status


def raise_(error):
    raise error


def test_iter_status_storage_and_what_would_be_saved_at_each_point():
    def note(t):
        assert get_event_storage() is t.storage
        assert t.storage.iter == t.iter
        assert t.start_iter == 3
        assert t.max_iter == 5
        return t.iter, t.status, t.state_dict()["iteration"]

    calls = []
    trainer = Trainer([Spy(calls, note)])
    assert trainer.iter == 0
    assert trainer.start_iter == 0
    assert trainer.max_iter == 0
    assert trainer.status == "not started"
    assert trainer.state_dict()["iteration"] == -1

    trainer.train(3, 5)

    # with the iteration that would be saved: the last one whose step is done
    assert calls == [
        ("before_train", 3, "running", 2),
        ("before_step", 3, "running", 2),
        ("after_backward", 3, "running", 2),
        ("after_step", 3, "running", 3),
        ("before_step", 4, "running", 3),
        ("after_backward", 4, "running", 3),
        ("after_step", 4, "running", 4),
        ("after_train", 5, "finished", 4),
    ]
    assert trainer.iter == 5
    assert trainer.start_iter == 3
    assert trainer.max_iter == 5
    assert trainer.status == "finished"
    assert not has_event_storage()


def test_a_start_behind_the_end_is_refused_before_anything_happens():
    calls = []
    trainer = Trainer([Spy(calls, iter_and_status)])
    for start_iter, max_iter in ((5, 4), (-1, 4)):
        message = (
            f"need 0 <= start_iter <= max_iter, got start_iter={start_iter} and max_iter={max_iter}"
        )
        with pytest.raises(ValueError, match=message):
            trainer.train(start_iter, max_iter)
    assert calls == []
    assert trainer.status == "not started"


def test_a_hook_registered_during_training_runs_from_the_next_point_on():
    calls = []

    def register(trainer):
        if trainer.iter == 1:
            trainer.register_hooks([Spy(calls, lambda t: [t.iter])])

    Trainer([CallbackHook(after_backward=register)]).train(0, 3)
    assert calls == [("after_step", 1), *((point, 2) for point in POINTS[1:4]), ("after_train", 3)]


@pytest.mark.parametrize(
    ("fail_at", "error", "message"),
    [
        (0, RuntimeError("out of memory"), "RuntimeError: out of memory"),
        # the last one: it has not finished
        (
            2,
            RuntimeError("out of memory"),
            "RuntimeError: out of memory",
        ),
        (1, KeyboardInterrupt(), "KeyboardInterrupt: "),
    ],
)
def test_a_failing_step_is_logged_with_its_iteration_and_raised_after_after_train(
    fail_at, error, message, caplog
):
    caplog.set_level(logging.DEBUG, "trainkit")
    calls = []
    trainer = Trainer([Spy(calls, iter_and_status)], fail_at, error)
    with pytest.raises(type(error)) as caught:
        trainer.train(0, 3)
    assert caught.value is error
    assert calls[-2:] == [("before_step", fail_at, "running"), ("after_train", fail_at, "failed")]
    assert trainer.iter == fail_at
    assert trainer.status == "failed"
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert f"after {fail_at} of 3 iterations (in iteration {fail_at}, " in record.getMessage()
    assert record.getMessage().endswith(f": {message}")
    assert record.exc_info is None  # the error is raised again, with its traceback
    [traced] = [record for record in caplog.records if record.exc_info is not None]
    assert traced.levelno == logging.DEBUG  # for the log file
    assert traced.exc_info[1] is error
    assert not has_event_storage()
    storage = trainer.storage
    with contextlib.suppress(type(error)):
        trainer.train(fail_at, 3)
    assert trainer.storage is storage  # what was not written yet will be


def test_every_after_train_runs_and_the_first_failure_is_raised(caplog):
    calls, first = [], OSError("a")
    hooks = [
        Spy(calls, lambda t: ("a", t.status), "after_train", lambda t: raise_(first)),
        Spy(calls, lambda t: ("b", t.status), "after_train", lambda t: raise_(KeyError("b"))),
        Spy(calls, lambda t: ("c", t.status)),
    ]
    trainer = Trainer(hooks)
    with pytest.raises(OSError, match="a") as caught:
        trainer.train(0, 0)
    assert caught.value is first
    # the run has failed with the first of them: the others must not wait for other ranks
    found = {name: status for point, name, status in calls if point == "after_train"}
    assert found == {"a": "finished", "b": "failed", "c": "failed"}
    assert trainer.status == "failed"
    assert caplog.text.count("Spy failed in after_train") == 2


def test_a_failure_in_after_train_does_not_hide_the_one_before_it(caplog):
    hook = CallbackHook(after_train=lambda t: raise_(KeyError("later")))
    with pytest.raises(RuntimeError, match="step failed"):
        Trainer([hook], fail_at=1).train(0, 3)
    assert "CallbackHook failed in after_train: KeyError: 'later'" in caplog.text


@pytest.mark.parametrize(
    ("point", "finished", "done", "status", "max_iter"),
    [
        ("before_train", False, 0, "stopped", 5),
        ("before_step", False, 2, "stopped", 5),
        ("after_step", True, 2, "finished", 2),  # the run has reached its goal
    ],
)
def test_a_requested_stop_ends_the_run_after_its_iteration(
    point, finished, done, status, max_iter, caplog
):
    caplog.set_level(logging.INFO)

    def stop(trainer):
        if trainer.iter == (0 if point == "before_train" else 1):
            trainer.request_stop("enough", finished=finished)
            trainer.request_stop("more than enough")  # the first one counts

    calls = []
    trainer = Trainer([Spy(calls, iter_and_status, point, stop)])
    trainer.train(0, 5)
    assert calls[-1] == ("after_train", done, status)
    assert len(calls) == 2 + 3 * done
    assert trainer.max_iter == max_iter
    [text] = [text for text in caplog.messages if "Stopped" in text]
    assert f"after {done} of 5 iterations" in text
    assert text.endswith(": enough")


def test_a_run_that_a_signal_has_stopped_ends_the_process_after_its_iteration():
    calls = []
    trainer = Trainer(
        [Spy(calls, iter_and_status, "after_step", lambda t: signal.raise_signal(signal.SIGTERM))]
    )
    with pytest.raises(SystemExit, match="^143$"):
        trainer.train(0, 5)
    assert calls[-1] == ("after_train", 1, "stopped")


class Failing(EventWriter):
    def write(self):
        raise ValueError("no number")


def asynchronous(*hooks, fail_at=None):
    """A trainer whose metrics are stored and written by a worker; its loss is the number of the iteration."""
    model = Weight()
    trainer = SimpleTrainer(
        model,
        [torch.tensor(float(i)) for i in range(60)],
        sgd(model, 0.0),
        async_write_metrics=True,
    )
    fail = CallbackHook(
        before_step=lambda t: t.iter == fail_at and raise_(RuntimeError("step failed"))
    )
    trainer.register_hooks([fail, *hooks])
    return trainer


def test_after_train_and_the_writers_see_everything_that_waited_in_each_run(tmp_path):
    found = []
    trainer = asynchronous(
        CallbackHook(after_train=lambda t: found.append(t.storage.history("total_loss").values())),
        CallbackHook(after_train=lambda t: t.storage.put_scalar("result", t.iter)),
        PeriodicWriter([JSONWriter(tmp_path / "metrics.json")], period=2),
    )
    trainer.train(0, 3)
    trainer.train(3, 4)
    first = [(0.0, 0), (1.0, 1), (2.0, 2)]
    assert found == [first, [*first, (3.0, 3)]]  # the second run goes on
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    written = [[line["iteration"], line.get("total_loss"), line.get("result")] for line in lines]
    assert written == [
        [1, 0.5, None],
        [2, 1.0, None],
        [3, None, 3.0],
        [3, 1.5, None],
        [4, None, 3.5],
    ]
    assert [
        thread.name for thread in threading.enumerate() if thread.name.startswith("trainkit")
    ] == []


def stopped_at_5():
    """6 of 10 updates are done, and the run stands at iteration 6."""
    model = Regression()
    trainer = SimpleTrainer(model, batches(10), sgd(model))
    trained = []
    trainer.register_hooks(
        [
            CallbackHook(after_backward=lambda trainer: trained.append(trainer.iter)),
            CallbackHook(after_step=lambda t: t.request_stop("enough") if t.iter == 5 else None),
        ]
    )
    trainer.train(0, 10)
    return trainer, trained


def test_a_run_that_was_stopped_goes_on_at_its_next_iteration_without_a_warning(caplog):
    trainer, trained = stopped_at_5()
    assert trainer.next_iter == 6
    trainer.train(trainer.next_iter, 10)
    assert trained == [*range(10)]
    assert [iter for _, iter in trainer.storage.history("total_loss").values()] == [*range(10)]
    assert trainer.next_iter == 10
    trainer.train(trainer.next_iter, 12)
    assert [iter for _, iter in trainer.storage.history("total_loss").values()] == [*range(12)]
    assert "stands at" not in caplog.text
    assert SimpleTrainer(trainer.model, [], trainer.optimizer).next_iter == 0


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (
            7,
            "This run has done 6 iterations, so train(7, ...) skips iterations, and its metrics start anew",
        ),
        (0, "so train(0, ...) trains iterations again"),
    ],
)
def test_a_gap_or_a_repeat_is_a_warning(start, says, caplog):
    trainer, trained = stopped_at_5()
    trainer.train(start, 8)
    assert says in caplog.text
    assert "call train(trainer.next_iter, max_iter)" in caplog.text
    assert trained == [*range(6), *range(start, min(8, 6 if start == 0 else 8))]
    caplog.clear()

    loaded = SimpleTrainer(Regression(), batches(10), trainer.optimizer)
    loaded.load_state_dict({**trainer.state_dict(), "iteration": 5})
    loaded.train(start, start)
    assert says in caplog.text


def test_an_error_of_the_worker_ends_the_run_at_most_20_iterations_later_and_hides_no_other(caplog):
    trainer = asynchronous(PeriodicWriter([Failing()], period=1))
    with pytest.raises(ValueError, match="no number"):
        trainer.train(0, 60)
    assert 1 <= trainer.iter <= 21
    assert trainer.status == "failed"
    caplog.clear()
    with pytest.raises(RuntimeError, match="step failed"):
        asynchronous(PeriodicWriter([Failing()], period=20), fail_at=3).train(0, 60)
    assert "ValueError: no number" in caplog.text


def test_a_trainer_is_freed_with_its_last_reference():
    gc.collect()
    gc.disable()
    try:
        trainer = Trainer([IterationTimer(), PeriodicWriter([]), Spy([], iter_and_status)])
        trainer.train(0, 3)
        trainer.load_state_dict(trainer.state_dict())
        hook = CallbackHook()
        trainer.register_hooks([hook])
        reference = weakref.ref(trainer)
        del trainer
        assert reference() is None
        with pytest.raises(ReferenceError):
            _ = hook.trainer.iter
    finally:
        gc.enable()


class A(HookBase):
    def __eq__(self, other):
        return isinstance(other, A)

    def after_step(self):
        pass


B, C = (type(name, (A,), {}) for name in "BC")
Early = type("Early", (A,), {"priority": Priority.HIGH})
Late = type("Late", (A,), {"priority": "LOW"})


def order(trainer):
    """The classes of the hooks in the order in which they run after a step."""
    lines = [line.split(maxsplit=1) for line in trainer.describe_hooks().splitlines()]
    names = [name for point, names in lines if point == "after_step" for name in names.split(", ")]
    return [name.partition("#")[0] for name in names]


def test_hooks_are_ordered_by_priority_and_then_by_registration_and_one_in_the_call_replaces_their_own():
    names = [
        "HIGHEST",
        "VERY_HIGH",
        "HIGH",
        "ABOVE_NORMAL",
        "NORMAL",
        "BELOW_NORMAL",
        "LOW",
        "VERY_LOW",
        "LOWEST",
    ]
    of_mmengine = dict(zip(names, [0, 10, 30, 40, 50, 60, 70, 90, 100], strict=True))
    assert {priority.name: priority.value for priority in Priority} == of_mmengine
    trainer = Trainer([A(), Late(), Early(), B()])
    trainer.register_hooks([C(), Early(), Late()])
    assert order(trainer) == ["Early", "Early", "A", "B", "C", "Late", "Late"]
    trainer = Trainer([Early(), A()])
    trainer.register_hooks([Late()], priority=40)
    trainer.register_hooks([Early()], priority=Priority.ABOVE_NORMAL)
    trainer.register_hooks([B()], priority="ABOVE_NORMAL")
    assert order(trainer) == ["Early", "Late", "Early", "B", "A"]


def test_the_timer_runs_first_and_the_writer_last_whenever_they_and_others_are_registered():
    trainer = Trainer([A(), PeriodicWriter([])])
    trainer.register_hooks([B()], priority="HIGHEST")
    trainer.register_hooks([IterationTimer()])
    trainer.register_hooks([Early()], priority="HIGHEST")
    trainer.register_hooks([C()], priority="LOWEST")
    trainer.register_hooks([Late()])
    assert order(trainer) == ["IterationTimer", "B", "Early", "A", "Late", "C", "PeriodicWriter"]


@pytest.mark.parametrize(
    "anchor", [lambda b: B, lambda b: b, lambda b: "B"], ids=["class", "object", "name"]
)
def test_an_anchor_gives_the_place_next_to_it(anchor):
    b = B()
    trainer = Trainer([A(), b, Late()])
    trainer.register_hooks([Early(), C()], before=anchor(b))
    trainer.register_hooks([type("Timer", (IterationTimer,), {})()], after=anchor(b))
    assert order(trainer) == ["A", "Early", "C", "B", "Timer", "Late"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"before": "Absent"},
            r"the anchor 'Absent' matches 0 hooks; it must match one of: B, B, Late",
        ),
        ({"after": Early}, r"matches 0 hooks"),
        ({"after": B}, r"the anchor .*B.* matches 2 hooks"),
        ({"before": A}, r"matches 3 hooks"),
        ({"before": B()}, r"matches 0 hooks"),
        ({"priority": 0, "after": Late}, "one of priority, before and after"),
        ({"before": Late, "after": Late}, "one of priority, before and after"),
        ({"priority": 101}, r"from 0 .* to 100 .* or one of HIGHEST, .*, LOWEST; got 101"),
        ({"priority": "EARLY"}, "got 'EARLY'"),
    ],
)
def test_a_place_that_is_absent_ambiguous_or_out_of_range_is_refused(arguments, message):
    trainer = Trainer([B(), B(), Late()])
    with pytest.raises(ValueError, match=message):
        trainer.register_hooks([C()], **arguments)
    assert order(trainer) == ["B", "B", "Late"]


def test_what_is_no_hook_and_the_same_hook_twice_are_refused_and_nothing_is_registered():
    trainer, b = Trainer(), B()
    for hooks, message in (
        ([b, A], r"subclasses of HookBase, got <class .*A'>; write Hook\(\)"),
        ([b, raise_], r"subclasses of HookBase, got .*CallbackHook\(after_step=function\)"),
        (b, r"takes a list of hooks, got .*; write \[hook\]"),
    ):
        with pytest.raises(TypeError, match=message):
            trainer.register_hooks(hooks)
    with pytest.raises(ValueError, match="this B is registered already"):
        trainer.register_hooks([b, b])
    with pytest.raises(TypeError, match="got 'after_epok'; accepted: before_train, before_epoch"):
        CallbackHook(after_epok=print)
    assert order(trainer) == []


def test_hooks_are_described_by_point_in_order_and_the_description_is_logged(caplog):
    caplog.set_level(logging.INFO)

    class Both(A):
        def before_train(self):
            pass

    trainer = Trainer([Late(), Both(), Early(), CallbackHook(after_backward=print)])

    lines = trainer.describe_hooks().splitlines()
    assert [line.split(maxsplit=1) for line in lines if "save point" not in line] == [
        ["before_train", "Both"],  # a point that nobody overrides has no line
        ["after_backward", "CallbackHook"],
        ["after_step", "Early, Both"],
        ["after_step", "Late"],
    ]
    assert "save point" in lines[3]
    trainer.train(2, 2)
    assert "after 2 of 2 iterations" in caplog.text
    assert trainer.describe_hooks() in caplog.text


class Counting(HookBase):
    def __init__(self, count=0):
        self.count = count

    def after_step(self):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def test_hooks_of_one_class_keep_a_state_each_also_if_they_are_registered_after_loading(caplog):
    state = Trainer([A(), Counting(10), Counting(20), Counting(30)]).state_dict()
    assert state["hooks"] == {
        "Counting": {"count": 10},
        "Counting#2": {"count": 20},
        "Counting#3": {"count": 30},
    }
    hooks = [Counting(), Counting(), Counting()]
    trainer = Trainer(hooks[:2])
    trainer.load_state_dict(state)
    trainer.register_hooks(hooks[2:])
    trainer.train(0, 0)
    assert [hook.count for hook in hooks] == [10, 20, 30]
    assert caplog.messages == []


def test_states_that_no_hook_takes_are_warned_about_by_name_and_a_hook_that_cannot_load_its_own_is_an_error(
    caplog,
):
    trainer = Trainer([Counting()])
    trainer.load_state_dict(
        {"iteration": 3, "hooks": {"Gone": {"a": 1}, "Counting": {"count": 1}, "Lost": {"b": 2}}}
    )
    assert trainer.done == 4
    assert trainer.boundary_done == 4
    trainer.train(4, 4)
    assert "after 4 of 4 iterations" in repr(trainer)
    assert "finished" in repr(trainer)
    assert "after 0 iterations" in repr(Trainer([]))
    assert "not started" in repr(Trainer([]))
    [text] = [text for text in caplog.messages if "not registered" in text]
    assert text.endswith(": ['Gone', 'Lost']")
    forgetful = CallbackHook()
    forgetful.state_dict = lambda: {"best": 1.0}
    trainer = Trainer([forgetful])
    with pytest.raises(
        NotImplementedError, match="CallbackHook saves a state but has no load_state_dict"
    ):
        trainer.load_state_dict(trainer.state_dict())


def test_the_hooks_of_a_failure_are_told_the_error_and_one_that_fails_hides_nothing(caplog):
    told = []

    class Tell(HookBase):
        def after_failure(self, error):
            assert self.trainer.iter == 3
            assert self.trainer.status == "failed"
            assert self.trainer.failure is error
            told.append(str(error))
            raise KeyError("of the hook")

    with pytest.raises(OSError, match="of the step"):
        Trainer([Tell(), Tell()], fail_at=3, error=OSError("of the step")).train(3, 5)
    assert told == ["of the step"] * 2
    assert caplog.text.count("Tell failed in after_failure: KeyError: 'of the hook'") == 2
