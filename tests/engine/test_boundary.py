"""The boundary of an update: each hook below the save point acts once, also after a failure, a stop and a resume."""

import pytest
import torch

from trainkit.engine import HookBase, TrainerBase
from trainkit.evaluation.observer import EvaluationAbandoned


class Counter(TrainerBase):
    """Its update counts; its epochs have two iterations."""

    iters_per_epoch = 2

    def __init__(self, *hooks):
        super().__init__()
        self.updates = 0
        self.register_hooks(hooks)

    def run_step(self):
        self.updates += 1


class Note(HookBase):
    """Notes its calls below the save point; raises ``error`` once, in the call of ``at`` updates."""

    priority = "LOW"

    def __init__(self, calls, name, *, at=None, error=None):
        self.calls, self.name, self.at, self.error = calls, name, at, error

    def after_step(self):
        if self.trainer.done == self.at and self.error is not None:
            error, self.error = self.error, None
            raise error
        self.calls.append(f"{self.name} {self.trainer.iter}")


class AtEpochs(Note):
    """Acts in two calls of the boundary."""

    def after_epoch(self):
        if self.at == "epoch" and self.error is not None:
            error, self.error = self.error, None
            raise error
        self.calls.append(f"{self.name} epoch {self.trainer.epoch}")


def run_of(calls, *, at=None, error=None, epoch_fails=False):
    first = AtEpochs(calls, "first", at="epoch" if epoch_fails else None, error=error)
    evaluation = Note(calls, "evaluation", at=at, error=None if epoch_fails else error)
    return Counter(first, evaluation, Note(calls, "last"))


WHOLE = ["first 0", "evaluation 0", "last 0"]
WHOLE += ["first 1", "evaluation 1", "last 1", "first epoch 0"]
WHOLE += ["first 2", "evaluation 2", "last 2"]
WHOLE += ["first 3", "evaluation 3", "last 3", "first epoch 1"]


def test_the_hooks_below_the_save_point_are_called_once_per_update():
    calls = []
    run_of(calls).train(0, 4)
    assert calls == WHOLE


@pytest.mark.parametrize("epoch_fails", [False, True])
@pytest.mark.parametrize("in_this_process", [False, True])
def test_a_run_that_failed_in_the_boundary_goes_on_with_the_call_that_failed(
    in_this_process, epoch_fails
):
    calls = []
    trainer = run_of(calls, at=2, error=ValueError("a broken evaluator"), epoch_fails=epoch_fails)
    with pytest.raises(ValueError, match="a broken evaluator"):
        trainer.train(0, 4)
    assert trainer.done == 2
    assert trainer.boundary_done == 1
    assert trainer.iter == 1
    if not in_this_process:
        state = trainer.state_dict()
        trainer = run_of(calls)
        trainer.load_state_dict(state)
    trainer.train(trainer.next_iter, 4)
    assert calls == WHOLE


@pytest.mark.parametrize("in_this_process", [False, True])
def test_a_run_that_was_stopped_in_an_evaluation_repeats_it_and_nothing_else(in_this_process):
    calls = []
    trainer = run_of(calls, at=3, error=EvaluationAbandoned("stop"))
    trainer.train(0, 4)
    assert trainer.status == "stopped"
    assert trainer.iter == 3
    assert calls[-1] == "first 2"
    if not in_this_process:
        state = trainer.state_dict()
        trainer = run_of(calls)
        trainer.load_state_dict(state)
    trainer.train(trainer.next_iter, 4)
    assert calls == WHOLE


def test_a_run_that_is_saved_at_the_save_point_starts_with_the_boundary_of_its_last_update():
    class Save(HookBase):
        def after_step(self):
            if self.trainer.iter == 1:
                self.trainer.request_save("state", lambda: states.append(self.trainer.state_dict()))

    calls, states = [], []
    trainer = run_of(calls)
    trainer.register_hooks([Save()])
    trainer.train(0, 2)
    del calls[:]
    trainer = run_of(calls)
    trainer.load_state_dict(states[0])
    trainer.train(2, 4)
    assert calls == WHOLE[3:]
    assert trainer.updates == 2


@pytest.mark.parametrize("has_state", [False, True])
def test_a_start_that_no_state_explains_has_no_boundary(has_state):
    calls = []
    trainer = run_of(calls)
    if has_state:
        trainer.load_state_dict({"iteration": 0, "boundary": {"is_over": False, "passed": []}})
    trainer.train(2, 4)
    assert calls == WHOLE[7:]


def test_a_hook_that_is_added_between_two_runs_acts_in_the_second_one_only():
    calls = []
    trainer = run_of(calls)
    trainer.train(0, 2)
    trainer.register_hooks([Note(calls, "new")])
    del calls[:]
    trainer.train(2, 3)
    assert calls == ["first 2", "evaluation 2", "last 2", "new 2"]


def test_saves_that_are_asked_for_in_the_boundary_are_written_at_its_end_and_record_all_of_it():
    class Best(HookBase):
        priority = "LOW"

        def after_step(self):
            self.trainer.request_save("best", lambda: states.append(self.trainer.state_dict()))

    calls, states = [], []
    trainer = Counter(Best(), Note(calls, "last"))
    trainer.train(0, 1)
    assert states[0]["boundary"] == {"is_over": True, "passed": []}
    trainer = Counter(Best(), Note(calls, "last"))
    trainer.load_state_dict(states[0])
    trainer.train(1, 2)
    assert calls == ["last 0", "last 1"]


def test_a_hook_above_the_save_point_that_fails_does_not_undo_the_update():
    class Fails(HookBase):
        def after_step(self):
            if self.trainer.iter == 1 and self.trainer.status == "running":
                raise ValueError("above")

    trainer = Counter(Fails())
    with pytest.raises(ValueError, match="above"):
        trainer.train(0, 4)
    assert trainer.updates == 2
    assert trainer.done == 2
    assert trainer.next_iter == 2
    assert trainer.iter == 1


def test_a_loop_of_the_users_own_completes_each_iteration():
    calls, saved = [], []

    class Own(Counter):
        def __init__(self):
            TrainerBase.__init__(self)
            self.updates = 0

        def train(self, start_iter, max_iter):
            self.start_iter, self.max_iter = start_iter, max_iter
            with self.storage:
                self.before_train()
                for self.iter in range(start_iter, max_iter):
                    self.before_step()
                    self.run_step()
                    self.after_step()
                self.after_train()

    class Save(HookBase):
        def before_epoch(self):
            calls.append(f"starts epoch {self.trainer.epoch}")

        def after_step(self):
            trainer = self.trainer
            trainer.request_save("x", lambda: saved.append((trainer.done, trainer.boundary_done)))

    trainer = Own()
    trainer.register_hooks([AtEpochs(calls, "first"), Note(calls, "evaluation"), Save()])
    trainer.train(0, 3)
    expected = ["starts epoch 0", *WHOLE[:2], *WHOLE[3:5], WHOLE[6], "starts epoch 1", *WHOLE[7:9]]
    assert calls == expected
    assert saved == [(1, 0), (2, 1), (3, 2)]  # above the boundary of each update
    assert trainer.status == "finished"
    assert trainer.done == 3
    assert trainer.boundary_done == 3


def test_each_rank_saves_which_calls_have_returned():
    assert "boundary" in TrainerBase.own_keys


def test_the_random_state_of_a_resumed_run_is_there_in_the_boundary():
    class Draw(HookBase):
        priority = "LOW"

        def after_step(self):
            drawn.append((self.trainer.iter, torch.rand(1).item()))

    drawn = []
    trainer = Counter(Draw())
    state = {}
    trainer.register_hooks([Note([], "x", at=2, error=EvaluationAbandoned("stop"))], before="Draw")
    torch.manual_seed(0)
    trainer.train(0, 3)
    state = trainer.state_dict()
    trainer.train(2, 3)
    whole = list(drawn)
    torch.manual_seed(7)
    resumed = Counter(Note([], "x"), Draw())
    resumed.load_state_dict(state)
    resumed.train(2, 3)
    assert drawn[len(whole) :] == whole[1:]
