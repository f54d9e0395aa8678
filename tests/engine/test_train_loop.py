import functools
import gc
import json
import logging
import threading
import weakref

import pytest
import torch

from tests.engine.tiny import Weight, sgd
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


# ---------------------------------------------------------------------- the sequence of calls


def test_hooks_run_at_all_five_points_in_the_order_of_their_registration():
    calls = []
    trainer = Trainer([Spy(calls, lambda _: "a"), Spy(calls, lambda _: "b")])

    trainer.train(3, 5)

    step = [(point, name) for point in ("before_step", "after_backward", "after_step") for name in "ab"]
    assert calls == [
        ("before_train", "a"),
        ("before_train", "b"),
        *step,
        *step,
        ("after_train", "a"),
        ("after_train", "b"),
    ]


def test_iter_status_and_storage_at_each_point():
    def note(t):
        return t.iter, t.storage.iter, t.start_iter, t.max_iter, t.status, get_event_storage() is t.storage

    calls = []
    trainer = Trainer([Spy(calls, note)])
    assert (trainer.iter, trainer.start_iter, trainer.max_iter, trainer.status) == (0, 0, 0, "not started")

    trainer.train(3, 5)

    assert calls == [
        ("before_train", 3, 3, 3, 5, "running", True),
        *((point, 3, 3, 3, 5, "running", True) for point in POINTS[1:4]),
        *((point, 4, 4, 3, 5, "running", True) for point in POINTS[1:4]),
        ("after_train", 5, 5, 3, 5, "finished", True),
    ]
    assert (trainer.iter, trainer.start_iter, trainer.max_iter, trainer.status) == (5, 3, 5, "finished")
    assert not has_event_storage()


def test_the_same_trainer_and_hooks_train_twice():
    calls = []
    trainer = Trainer([Spy(calls, iter_and_status)])

    trainer.train(0, 1)
    trainer.train(1, 2)

    first, second = ([(point, i, "running") for point in POINTS[:4]] for i in range(2))
    assert calls == [*first, ("after_train", 1, "finished"), *second, ("after_train", 2, "finished")]


def test_no_iteration_is_left_when_start_and_end_are_equal():
    calls = []
    trainer = Trainer([Spy(calls, iter_and_status)])

    trainer.train(4, 4)

    assert calls == [("before_train", 4, "running"), ("after_train", 4, "finished")]


@pytest.mark.parametrize(("start_iter", "max_iter"), [(5, 4), (-1, 4)])
def test_a_start_behind_the_end_is_refused_before_anything_happens(start_iter, max_iter):
    calls = []
    trainer = Trainer([Spy(calls, iter_and_status)])

    message = f"need 0 <= start_iter <= max_iter, got start_iter={start_iter} and max_iter={max_iter}"
    with pytest.raises(ValueError, match=message):
        trainer.train(start_iter, max_iter)
    assert (calls, trainer.status) == ([], "not started")


def test_a_hook_registered_during_training_runs_from_the_next_point_on():
    calls = []

    def register(trainer):
        if trainer.iter == 1:
            trainer.register_hooks([Spy(calls, lambda t: ("late", t.iter))])

    trainer = Trainer([Spy(calls, lambda t: ("early", t.iter), "after_backward", register)])
    trainer.train(0, 3)

    assert [call for call in calls if call[1] == "late"] == [
        ("after_step", "late", 1),
        ("before_step", "late", 2),
        ("after_backward", "late", 2),
        ("after_step", "late", 2),
        ("after_train", "late", 3),
    ]


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_failing_step_is_logged_with_its_iteration_and_raised_behind_after_train(fail_at, caplog):
    calls = []
    error = RuntimeError("out of memory")
    trainer = Trainer([Spy(calls, iter_and_status)], fail_at, error)

    with pytest.raises(RuntimeError) as caught:
        trainer.train(0, 3)

    assert caught.value is error
    assert calls[-2:] == [("before_step", fail_at, "running"), ("after_train", fail_at, "failed")]
    assert (trainer.iter, trainer.status) == (fail_at, "failed")  # in the last iteration too: it has not finished
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == f"Training failed in iteration {fail_at}: RuntimeError: out of memory"
    assert record.exc_info[1] is error
    assert not has_event_storage()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupted_run_has_failed_says_so_without_a_traceback_and_runs_after_train(error, caplog):
    calls = []
    trainer = Trainer([Spy(calls, iter_and_status)], fail_at=1, error=error)

    with pytest.raises(type(error)) as caught:
        trainer.train(0, 3)

    assert caught.value is error
    assert calls[-1] == ("after_train", 1, "failed")
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage().startswith(f"Training failed in iteration 1: {type(error).__name__}")
    assert not record.exc_info


@pytest.mark.parametrize("errors", [(OSError("a"), KeyError("b")), (KeyboardInterrupt(), KeyError("b"))])
def test_every_after_train_runs_and_the_first_failure_is_raised(errors, caplog):
    calls = []
    hooks = [
        Spy(calls, lambda t: ("a", t.status), "after_train", lambda t: raise_(errors[0])),
        Spy(calls, lambda t: ("b", t.status), "after_train", lambda t: raise_(errors[1])),
        Spy(calls, lambda t: ("c", t.status)),
    ]
    trainer = Trainer(hooks)

    with pytest.raises(type(errors[0])) as caught:
        trainer.train(0, 0)

    assert caught.value is errors[0]
    # the run has failed with the first of them: the others must not wait for other ranks
    assert calls[-3:] == [
        ("after_train", "a", "finished"),
        ("after_train", "b", "failed"),
        ("after_train", "c", "failed"),
    ]
    assert trainer.status == "failed"
    assert [record.getMessage().split(":")[0] for record in caplog.records if record.levelno == logging.ERROR] == [
        "Spy failed in after_train"
    ] * 2


def test_a_failure_in_after_train_does_not_hide_the_one_before_it(caplog):
    spy = Spy([], iter_and_status, "after_train", lambda t: raise_(KeyError("later")))

    with pytest.raises(RuntimeError, match="step failed"):
        Trainer([spy], fail_at=1).train(0, 3)

    assert "Spy failed in after_train: KeyError: 'later'" in caplog.text


# ---------------------------------------------------------------------- stopping


def stop_at(iteration, **kwargs):
    def do(trainer):
        if trainer.iter == iteration:
            trainer.request_stop("enough", **kwargs)
            trainer.request_stop("more than enough")  # the first one counts

    return do


def test_a_requested_stop_ends_the_run_behind_its_iteration(caplog):
    caplog.set_level(logging.INFO)
    calls = []
    trainer = Trainer([Spy(calls, iter_and_status, "before_step", stop_at(1))])

    trainer.train(0, 5)

    assert calls[-4:] == [
        ("before_step", 1, "running"),
        ("after_backward", 1, "running"),
        ("after_step", 1, "running"),
        ("after_train", 2, "stopped"),
    ]
    assert (trainer.iter, trainer.max_iter, trainer.status) == (2, 5, "stopped")
    assert "Stopped after 2 of 5 iterations: enough" in caplog.messages


def test_a_stop_of_a_run_that_has_reached_its_goal_counts_as_finished():
    calls = []
    trainer = Trainer([Spy(calls, iter_and_status, "after_step", stop_at(1, finished=True))])

    trainer.train(0, 5)

    assert calls[-1] == ("after_train", 2, "finished")
    assert (trainer.iter, trainer.max_iter) == (2, 2)


def test_a_stop_in_before_train_ends_the_run_without_an_iteration():
    calls = []
    trainer = Trainer([Spy(calls, iter_and_status, "before_train", stop_at(3))])

    trainer.train(3, 5)

    assert calls == [("before_train", 3, "running"), ("after_train", 3, "stopped")]


# ---------------------------------------------------------------------- metrics of a worker


class Failing(EventWriter):
    def write(self):
        raise ValueError("no number")


def asynchronous(*hooks, fail_at=None):
    """A trainer whose metrics are stored and written by a worker; its loss is the number of the iteration."""
    model = Weight()
    trainer = SimpleTrainer(
        model, [torch.tensor(float(i)) for i in range(60)], sgd(model, 0.0), async_write_metrics=True
    )
    fail = CallbackHook(before_step=lambda t: t.iter == fail_at and raise_(RuntimeError("step failed")))
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

    assert found == [[(0.0, 0), (1.0, 1), (2.0, 2)], [(3.0, 3)]]
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    written = [[line["iteration"], line.get("total_loss"), line.get("result")] for line in lines]
    assert written == [[1, 0.5, None], [2, 1.0, None], [3, None, 3.0], [3, 3.0, None], [4, None, 4.0]]
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("trainkit")] == []


@pytest.mark.parametrize("period", [1, 20])
def test_an_error_of_the_worker_ends_the_run_at_most_20_iterations_later(period):
    trainer = asynchronous(PeriodicWriter([Failing()], period))
    with pytest.raises(ValueError, match="no number"):
        trainer.train(0, 60)
    assert period <= trainer.iter <= period + 20
    assert trainer.status == "failed"


def test_an_error_of_the_worker_does_not_hide_the_one_that_ended_the_run(caplog):
    with pytest.raises(RuntimeError, match="step failed"):
        asynchronous(PeriodicWriter([Failing()], period=20), fail_at=3).train(0, 60)

    assert "ValueError: no number" in caplog.text


# ---------------------------------------------------------------------- references


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


# ---------------------------------------------------------------------- registration and order


class A(HookBase):
    def after_step(self):
        pass


B, C = (type(name, (A,), {}) for name in "BC")
Early = type("Early", (A,), {"priority": Priority.HIGH})
Late = type("Late", (A,), {"priority": "LOW"})
Timer = type("Timer", (IterationTimer,), {})


def order(trainer):
    """The classes of the hooks in the order in which they run after a step."""
    lines = [line.split(maxsplit=1) for line in trainer.describe_hooks().splitlines()]
    names = [name for point, names in lines if point == "after_step" for name in names.split(", ")]
    return [name.partition("#")[0] for name in names]


def test_priorities_have_the_values_of_mmengine():
    names = ["HIGHEST", "VERY_HIGH", "HIGH", "ABOVE_NORMAL", "NORMAL", "BELOW_NORMAL", "LOW", "VERY_LOW", "LOWEST"]
    values = [0, 10, 30, 40, 50, 60, 70, 90, 100]
    assert {priority.name: priority.value for priority in Priority} == dict(zip(names, values, strict=True))


def test_hooks_are_ordered_by_priority_and_then_by_registration():
    trainer = Trainer([A(), Late(), Early(), B()])
    trainer.register_hooks([C(), Early(), Late()])

    assert order(trainer) == ["Early", "Early", "A", "B", "C", "Late", "Late"]


@pytest.mark.parametrize("priority", [40, Priority.ABOVE_NORMAL, "ABOVE_NORMAL"])
def test_a_priority_in_the_call_replaces_those_of_the_hooks(priority):
    trainer = Trainer([Early(), A()])
    trainer.register_hooks([Late(), Early()], priority=priority)
    trainer.register_hooks([B()], priority=40)

    assert order(trainer) == ["Early", "Late", "Early", "B", "A"]


def test_the_timer_runs_first_and_the_writer_last_whenever_they_and_others_are_registered():
    trainer = Trainer([A(), PeriodicWriter([])])
    trainer.register_hooks([B()], priority="HIGHEST")
    trainer.register_hooks([IterationTimer()])
    trainer.register_hooks([Early()], priority="HIGHEST")
    trainer.register_hooks([C()], priority="LOWEST")
    trainer.register_hooks([Late()])

    assert order(trainer) == ["IterationTimer", "B", "Early", "A", "Late", "C", "PeriodicWriter"]


@pytest.mark.parametrize("anchor", [lambda b: B, lambda b: b, lambda b: "B"], ids=["class", "object", "name"])
def test_an_anchor_gives_the_place_next_to_it(anchor):
    b = B()
    trainer = Trainer([A(), b, Late()])
    trainer.register_hooks([Early(), C()], before=anchor(b))
    trainer.register_hooks([Timer()], after=anchor(b))

    assert order(trainer) == ["A", "Early", "C", "B", "Timer", "Late"]


@pytest.mark.parametrize(
    ("anchor", "message"),
    [
        ("Absent", r"the anchor 'Absent' matches 0 hooks; it must match one of: B, B, Late"),
        (Early, r"matches 0 hooks"),
        (B, r"the anchor .*B.* matches 2 hooks"),
        ("B", r"the anchor 'B' matches 2 hooks; it must match one of: B, B, Late"),
        (A, r"matches 3 hooks"),
        (B(), r"matches 0 hooks"),
    ],
)
@pytest.mark.parametrize("where", ["before", "after"])
def test_an_absent_or_ambiguous_anchor_is_refused(anchor, message, where):
    trainer = Trainer([B(), B(), Late()])

    with pytest.raises(ValueError, match=message):
        trainer.register_hooks([C()], **{where: anchor})
    assert order(trainer) == ["B", "B", "Late"]


@pytest.mark.parametrize(
    "arguments",
    [{"priority": 50, "before": A}, {"priority": 0, "after": A}, {"before": A, "after": A}],
)
def test_an_anchor_and_a_priority_or_another_anchor_are_refused(arguments):
    with pytest.raises(ValueError, match="one of priority, before and after"):
        Trainer([A()]).register_hooks([B()], **arguments)


@pytest.mark.parametrize("priority", [-1, 101, "EARLY", 50.0])
def test_a_priority_out_of_range_is_refused(priority):
    with pytest.raises(ValueError, match=rf"from 0 .* to 100 .* or one of HIGHEST, .*, LOWEST; got {priority!r}"):
        Trainer().register_hooks([A()], priority=priority)


class NoHook:
    def after_step(self):
        pass


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([A], r"subclasses of HookBase, got <class .*A'>; write Hook\(\)"),
        ([raise_], r"subclasses of HookBase, got .*CallbackHook\(after_step=function\)"),
        ([NoHook()], r"subclasses of HookBase, got .*NoHook"),
        (A(), "not iterable"),
    ],
)
def test_what_is_no_hook_is_refused_and_nothing_is_registered(hooks, message):
    trainer = Trainer()

    with pytest.raises(TypeError, match=message):
        trainer.register_hooks([B(), *hooks] if isinstance(hooks, list) else hooks)
    assert order(trainer) == []


def test_the_same_hook_twice_is_refused():
    a = A()
    trainer = Trainer([a])

    with pytest.raises(ValueError, match="this A is registered already"):
        trainer.register_hooks([a])
    b = B()
    with pytest.raises(ValueError, match="this B is registered already"):
        trainer.register_hooks([b, b])
    assert order(trainer) == ["A"]


def test_hooks_are_described_by_point_in_order_and_the_description_is_logged(caplog):
    caplog.set_level(logging.INFO)

    class Both(A):
        def before_train(self):
            pass

    trainer = Trainer([Late(), Both(), Early(), CallbackHook(after_backward=print)])

    assert trainer.describe_hooks() == (
        "  before_train      Both\n"  # a point that nobody overrides has no line
        "  after_backward    CallbackHook\n"
        "  after_step        Early, Both\n"
        "  -- save point --  checkpoints are written; batch and losses are released\n"
        "  after_step        Late"
    )
    trainer.train(2, 2)
    assert "Training from iteration 2 to 2" in caplog.messages
    assert f"Hooks in order:\n{trainer.describe_hooks()}" in caplog.messages


# ---------------------------------------------------------------------- state


class Counting(HookBase):
    def __init__(self, count=0):
        self.count = count

    def after_step(self):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


class Forgetful(HookBase):
    def state_dict(self):
        return {"best": 1.0, "iter": 3}


def test_hooks_of_one_class_keep_a_state_each():
    state = Trainer([A(), Counting(10), Counting(20), Counting(30)]).state_dict()
    assert state["hooks"] == {"Counting": {"count": 10}, "Counting#2": {"count": 20}, "Counting#3": {"count": 30}}

    hooks = [Counting(), Counting(), Counting()]
    Trainer(hooks).load_state_dict(state)
    assert [hook.count for hook in hooks] == [10, 20, 30]


def test_hooks_registered_behind_the_loading_get_their_state(caplog):
    state = Trainer([Counting(10), Counting(20)]).state_dict()
    early, late = Counting(), Counting()
    trainer = Trainer([early])

    trainer.load_state_dict(state)
    trainer.register_hooks([late])
    trainer.train(0, 0)

    assert (early.count, late.count) == (10, 20)
    assert caplog.messages == []


def test_states_that_no_hook_takes_are_warned_about_by_name(caplog):
    trainer = Trainer([Counting()])
    trainer.load_state_dict({"iteration": 3, "hooks": {"Gone": {"a": 1}, "Counting": {"count": 1}, "Lost": {"b": 2}}})
    trainer.train(4, 4)

    assert "The checkpoint has states of hooks that are not registered: ['Gone', 'Lost']" in caplog.messages


def test_a_hook_that_saves_a_state_and_cannot_load_it_is_named():
    state = Trainer([Forgetful()]).state_dict()

    message = r"Forgetful saves a state but has no load_state_dict; define both"
    with pytest.raises(NotImplementedError, match=message):
        Trainer([Forgetful()]).load_state_dict(state)


def test_the_saved_iteration_is_the_last_one_whose_step_is_done():
    calls = []
    trainer = Trainer([Spy(calls, lambda t: [t.state_dict()["iteration"]])])
    assert trainer.state_dict()["iteration"] == -1

    trainer.train(3, 5)

    assert calls == [
        ("before_train", 2),
        ("before_step", 2),
        ("after_backward", 2),
        ("after_step", 3),
        ("before_step", 3),
        ("after_backward", 3),
        ("after_step", 4),
        ("after_train", 4),
    ]
    assert trainer.state_dict()["iteration"] == 4


# ---------------------------------------------------------------------- hooks that say when they are due


class Every(HookBase):
    def __init__(self, period):
        self.period, self.called = period, []

    def next_due(self, done):
        return done + self.period - done % self.period

    def after_step(self):
        self.called.append(self.trainer.iter + 1)


def test_a_hook_with_next_due_is_called_where_it_or_another_one_is_due_and_others_in_each_iteration():
    class InEach(HookBase):
        called = ()

        def after_step(self):
            self.called = (*self.called, self.trainer.iter + 1)

    each, threes, fives = InEach(), Every(3), Every(5)
    fives.priority = "LOW"  # below the save point
    trainer = Trainer()
    trainer.register_hooks([each, threes, fives])
    trainer.train(0, 11)

    assert each.called == tuple(range(1, 12))
    assert threes.called == fives.called == [1, 3, 5, 6, 9, 10]  # the first iteration looks at every hook


def test_the_hooks_of_a_failure_are_told_the_error_and_one_that_fails_hides_nothing(caplog):
    told = []

    class Tell(HookBase):
        def after_failure(self, error):
            told.append((self.trainer.iter, self.trainer.status, self.trainer.failure is error, str(error)))
            raise KeyError("of the hook")

    def fail(trainer):
        raise OSError("of the step")

    trainer = Trainer()
    trainer.register_hooks([Tell(), Tell(), CallbackHook(before_step=fail)])
    with pytest.raises(OSError, match="of the step"):
        trainer.train(3, 5)

    assert told == [(3, "failed", True, "of the step")] * 2
    assert caplog.text.count("Tell failed in after_failure: KeyError: 'of the hook'") == 2
