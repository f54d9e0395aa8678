"""A run goes on where its checkpoint stood: the hook points, the states, the random numbers."""

import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from fvcore.common.param_scheduler import LinearParamScheduler

from tests.engine.tiny import AfterStep, Regression, Steps, batches, scalars, sgd
from trainkit.checkpoint import Checkpointer
from trainkit.engine import hooks
from trainkit.engine.hook_base import ITERATION_POINTS
from trainkit.engine.train_loop import HookBase
from trainkit.engine.trainers import SimpleTrainer
from trainkit.evaluation import inference_on_dataset, observe_inference
from trainkit.solver import LRMultiplier

POINTS = ("before_train", *ITERATION_POINTS, "after_train")


class Recorder(HookBase):
    """Notes (name, point, iteration, a random number) at every point into a list that all of them share."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls
        for point in POINTS:
            setattr(self, point, lambda point=point: self.note(point))

    def note(self, point):
        drawn = None if point == "before_train" else random.random() + np.random.rand() + torch.rand(()).item()
        self.calls.append((self.name, point, self.trainer.iter, drawn))


class SaveAt(HookBase):
    """Keeps what a checkpoint would hold at one point of one iteration."""

    def __init__(self, point, iter):
        self.iter, self.state = iter, None
        setattr(self, point, self.save)

    def save(self):
        if self.trainer.iter == self.iter:
            self.calls_before = len(self.calls)
            self.state = self.trainer.state_dict()


class Epochs(Steps):
    iters_per_epoch = 2


def job(calls, save=None):
    trainer = Epochs(step=lambda iter: calls.append(("step", "run_step", iter, torch.rand(()).item())))
    first, last = Recorder("first", calls), Recorder("last", calls)
    if save is not None:
        save.calls = calls
    # a hook that is not there in the resumed run either stands or does not stand in the place of the saving one
    trainer.register_hooks([first, save or HookBase(), last])
    return trainer


CASES = [("before_epoch", 2), ("after_epoch", 3), ("after_train", 4)]
CASES += [(point, iter) for point in ("before_step", "after_step") for iter in (2, 3)]


def seed(value):
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


@pytest.mark.parametrize(("point", "iter"), CASES)
def test_a_resumed_run_makes_the_calls_that_were_left_and_no_other(point, iter):
    seed(1)
    whole, save = [], SaveAt(point, iter)
    job(whole, save).train(0, 4)

    seed(2)
    resumed = []
    trainer = job(resumed)
    trainer.load_state_dict(save.state)
    trainer.train(trainer.iter + 1, 4)

    assert resumed[:2] == [(name, "before_train", trainer.start_iter, None) for name in ("first", "last")]
    assert resumed[2:] == whole[save.calls_before :]
    assert trainer.status == "finished"


def test_without_the_random_state_the_same_calls_draw_other_numbers():
    seed(1)
    whole, save = [], SaveAt("after_step", 2)
    job(whole, save).train(0, 4)

    seed(2)
    resumed = []
    trainer = job(resumed)
    del save.state["rng"]
    trainer.load_state_dict(save.state)
    trainer.train(3, 4)

    left = whole[save.calls_before :]
    assert [call[:3] for call in resumed[2:]] == [call[:3] for call in left]
    assert resumed[2:] != left


def test_a_hook_that_is_new_in_the_resumed_run_begins_with_the_next_iteration():
    calls, save = [], SaveAt("after_step", 2)
    job(calls, save).train(0, 4)
    trainer, new = job([]), []
    trainer.register_hooks([AfterStep(lambda trainer: new.append(trainer.iter))])
    trainer.load_state_dict(save.state)
    trainer.train(3, 4)
    assert new == [3]


def test_the_cursor_counts_only_where_the_checkpoint_stood():
    save = SaveAt("after_step", 2)
    job([], save).train(0, 6)
    calls = []
    trainer = job(calls)
    trainer.load_state_dict(save.state)
    trainer.train(5, 6)
    assert [call[1:3] for call in calls if call[0] in ("last", "step")][1:4] == [
        ("before_step", 5),
        ("run_step", 5),
        ("after_step", 5),
    ]


def test_a_state_that_nothing_was_done_with_is_given_back_as_it_was():
    save = SaveAt("after_step", 2)
    job([], save).train(0, 4)
    seed(5)
    trainer = job([])
    trainer.load_state_dict(save.state)
    state = trainer.state_dict()
    assert state["cursor"] == save.state["cursor"] == {
        "point": "after_step", "pending": ["Recorder#2"], "max_iter": 4, "finished_early": None,
    }  # fmt: skip
    assert state["rng"] is save.state["rng"]
    assert state["iteration"] == 2


def test_a_checkpoint_from_inside_an_iteration_draws_a_warning_and_repeats_it(caplog):
    states = []
    trainer = Steps(step=lambda iter: states.append(trainer.state_dict()))
    trainer.train(0, 2)
    assert "inside an iteration cannot be resumed exactly" in caplog.text
    resumed = []
    trainer = Steps(step=resumed.append)
    trainer.load_state_dict(states[1])
    trainer.train(trainer.iter + 1, 3)
    assert resumed == [1, 2]


# ---------------------------------------------------------------------- how a run ends


def finish_at(iter):
    return AfterStep(lambda trainer: trainer.iter == iter and trainer.request_stop("good enough", finished=True))


@pytest.mark.parametrize(("point", "iter"), [("after_step", 2), ("after_train", 3)])
def test_a_run_that_has_finished_early_is_finished_by_the_resumed_one(point, iter):
    def finishing(calls, save=None):
        trainer = Epochs(step=lambda iter: calls.append(iter))
        trainer.register_hooks([finish_at(2), save or HookBase(), Recorder("last", calls)])
        return trainer

    save = SaveAt(point, iter)
    whole = save.calls = []
    finishing(whole, save).train(0, 9)
    resumed = []
    trainer = finishing(resumed)
    trainer.load_state_dict(save.state)
    trainer.train(3, 9)

    assert [call[:3] for call in resumed[1:]] == [call[:3] for call in whole[save.calls_before :]]
    assert resumed[-1][1:3] == ("after_train", 3)
    assert (trainer.status, trainer.iter, trainer.max_iter) == ("finished", 3, 3)


@pytest.mark.parametrize(("point", "iter"), [("after_step", 2), ("after_train", 3)])
def test_a_larger_max_iter_moves_the_end_of_a_run_that_has_finished_early(point, iter):
    save = SaveAt(point, iter)
    save.calls = []
    trainer = Steps([finish_at(2), save])
    trainer.train(0, 9)
    steps = []
    trainer = Steps(step=steps.append)
    trainer.load_state_dict(save.state)
    trainer.train(3, 10)
    assert steps == [3, 4, 5, 6, 7, 8, 9]


def test_training_goes_on_after_a_stop_as_if_there_had_been_none():
    def run(trainer):
        trainer.register_hooks(
            [
                hooks.IterationTimer(),
                AfterStep(lambda trainer: trainer.storage.put_scalar("drawn", random.random())),
            ]
        )
        return trainer

    seed(1)
    whole = run(Steps())
    whole.train(0, 6)

    seed(1)
    trainer = run(Steps())
    trainer.register_hooks([AfterStep(lambda trainer: trainer.iter == 3 and trainer.request_stop("enough"))])
    trainer.train(0, 6)
    assert (trainer.status, trainer.iter) == ("stopped", 4)
    trainer.train(4, 6)

    assert trainer.status == "finished"
    assert scalars(trainer) == scalars(whole)


@pytest.mark.parametrize("stop_at", [2, 3])  # inside an epoch and at its end
def test_a_run_that_is_stopped_before_it_has_done_anything_stands_where_it_stood(stop_at):
    whole = []
    trainer = job(whole)
    trainer.register_hooks([AfterStep(lambda trainer: trainer.iter == stop_at and trainer.request_stop("enough"))])
    trainer.train(0, 6)
    state = trainer.state_dict()
    for _ in range(2):
        resumed = []
        trainer = job(resumed)
        trainer.register_hooks([hooks.CallbackHook(before_train=lambda trainer: trainer.request_stop("at once"))])
        trainer.load_state_dict(state)
        trainer.train(stop_at + 1, 6)
        assert {point for _, point, _, _ in resumed} == {"before_train", "after_train"}
        assert (trainer.status, trainer.iter) == ("stopped", stop_at + 1)
        state = trainer.state_dict()
    resumed = []
    trainer = job(resumed)
    trainer.load_state_dict(state)
    trainer.train(stop_at + 1, 6)
    assert [call[1:3] for call in resumed if call[0] == "last"][1:3] == [
        ("before_step" if stop_at == 2 else "before_epoch", stop_at + 1),
        ("after_step" if stop_at == 2 else "before_step", stop_at + 1),
    ]


@pytest.mark.parametrize("point", ["before_epoch", "before_step"])
def test_a_run_whose_end_has_been_moved_to_where_it_stands_does_no_iteration_more(point):
    save = SaveAt(point, 2)
    job([], save).train(0, 6)
    steps = []
    trainer = Epochs(step=steps.append)
    trainer.load_state_dict(save.state)
    trainer.train(2, 2)
    assert (steps, trainer.status, trainer.iter) == ([], "finished", 2)
    trainer.train(2, 3)
    assert steps == [2]


# ---------------------------------------------------------------------- with a model


def test_the_schedule_is_right_wherever_the_checkpoint_stands():
    def make(first, last=()):
        model = Regression()
        optimizer = sgd(model)
        trainer = SimpleTrainer(model, batches(8), optimizer)
        trainer.scheduler = LRMultiplier(optimizer, LinearParamScheduler(1.0, 0.0), 8)
        trainer.register_hooks(
            [*first, hooks.LRScheduler(), hooks.ParamScheduler("weight_decay", lambda t, base: t), *last]
        )
        return trainer

    whole = make([])
    whole.train(0, 8)
    for place in ("before", "behind"):
        save = SaveAt("after_step", 3)
        save.calls = []
        make([save], []).train(0, 5) if place == "before" else make([], [save]).train(0, 5)
        trainer = make([])
        trainer.load_state_dict(save.state)
        trainer.train(4, 8)
        for name in ("lr", "weight_decay"):
            assert scalars(trainer)[name] == scalars(whole)[name], (place, name)


def test_the_values_of_the_optimizer_are_those_of_the_checkpoint_and_the_differences_are_shown(caplog):
    model = Regression()
    state = SimpleTrainer(model, batches(2), sgd(model, lr=0.1, momentum=0.9, weight_decay=0.01)).state_dict()
    trainer = SimpleTrainer(model, batches(2), sgd(model, lr=0.1, momentum=0.5, weight_decay=0.01))
    trainer.load_state_dict(state)
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.9
    table = [line.split() for line in caplog.text.splitlines() if "momentum" in line]
    assert table == [["0", "momentum", "0.5", "0.9"]]
    assert "weight_decay" not in caplog.text


def test_what_a_loader_cannot_give_back_is_named_at_the_start_of_a_run_that_saves(caplog, tmp_path):
    model = Regression()
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    trainer.train(0, 1)
    assert "may differ" not in caplog.text
    trainer.register_hooks([hooks.PeriodicCheckpointer(Checkpointer(model, tmp_path, trainer=trainer), 5)])
    trainer.train(1, 2)
    assert "A resumed run may differ from one that is never stopped: " in caplog.text
    assert "state_dict" in caplog.text


class CountingLoader:
    """Says where it stands, and draws from the global random state when it is iterated, as torch's loaders do."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        torch.rand(())
        return self.batches()

    def batches(self):
        while self.position < 100:
            self.position += 1
            yield torch.full((2, 3), self.position / 10), torch.ones(2, 1)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class NoisyRegression(Regression):
    def forward(self, batch):
        return super().forward(batch) * (1 + torch.rand(()))


def test_a_loader_of_ones_own_goes_on_where_it_stood_and_what_it_draws_does_not_count():
    def make():
        model = NoisyRegression()
        return SimpleTrainer(model, CountingLoader(), sgd(model))

    seed(1)
    whole = make()
    whole.train(0, 8)

    seed(1)
    stopped, save = make(), SaveAt("after_step", 4)
    save.calls = []
    stopped.register_hooks([save])
    stopped.train(0, 5)
    model = {name: value.clone() for name, value in stopped.model.state_dict().items()}
    seed(2)
    resumed = make()
    resumed.model.load_state_dict(model)
    resumed.load_state_dict(save.state)
    resumed.train(5, 8)

    assert scalars(resumed) == scalars(whole)
    assert torch.equal(resumed.model.linear.weight, whole.model.linear.weight)


def test_the_random_state_of_another_number_of_processes_is_derived_from_the_checkpoint(caplog):
    save = SaveAt("after_step", 2)
    job([], save).train(0, 4)

    def drawn(world_size):
        calls = []
        trainer = job(calls)
        trainer.load_state_dict({**save.state, "world_size": world_size})
        trainer.train(3, 4)
        return [call[3] for call in calls if call[0] == "step"]

    as_saved, derived = drawn(1), drawn(2)
    assert derived == drawn(2) != as_saved
    assert "written by 2 processes, now there are 1" in caplog.text


def test_an_evaluation_whose_error_a_hook_has_swallowed_leaves_later_cursors_alone():
    def fail(inputs):
        raise RuntimeError("today")

    class Tolerant(HookBase):
        def after_step(self):
            with observe_inference(self.trainer, "val"), suppress(RuntimeError):
                inference_on_dataset(fail, [1], None)

    save = SaveAt("after_step", 2)
    save.calls = []
    trainer = Steps([Tolerant(), save])
    trainer.train(0, 3)
    assert save.state["cursor"]["pending"] == []
