"""A run goes on where its checkpoint stood: the hook points, the states, the random numbers."""

import random

import numpy as np
import pytest
import torch

from tests.engine.tiny import AfterStep, Regression, Steps, batches, sgd
from trainkit.checkpoint import Checkpointer
from trainkit.engine import hooks
from trainkit.engine.hook_base import HookBase, Priority
from trainkit.engine.step import SimpleTrainer

POINTS = ("before_train", "before_epoch", "before_step", "after_step", "after_epoch", "after_train")
BELOW = Priority.LOW


class Recorder(HookBase):
    """Notes (name, point, iteration, a random number) at every point into a list that all of them share."""

    def __init__(self, name, calls, priority=Priority.NORMAL):
        self.name, self.calls, self.priority = name, calls, priority
        for point in POINTS:
            setattr(self, point, lambda point=point: self.note(point))

    def note(self, point):
        drawn = None if point == "before_train" else random.random() + np.random.rand() + torch.rand(()).item()
        self.calls.append((self.name, point, self.trainer.iter, drawn))


class SaveAt(HookBase):
    """Asks for a checkpoint at one point of one iteration, and keeps what it would hold."""

    def __init__(self, point, iter, priority=Priority.NORMAL):
        self.iter, self.state, self.calls, self.priority = iter, None, [], priority
        setattr(self, point, self.ask)

    def ask(self):
        if self.trainer.iter == self.iter:
            self.trainer.request_save("kept", self.save)

    def save(self):
        self.calls_before = len(self.calls)
        self.state = self.trainer.state_dict()


class Epochs(Steps):
    iters_per_epoch = 2


def job(calls, save=None):
    trainer = Epochs(step=lambda iter: calls.append(("step", "run_step", iter, torch.rand(()).item())))
    above, below = Recorder("above", calls), Recorder("below", calls, BELOW)
    if save is not None:
        save.calls = calls
    trainer.register_hooks([above, save or HookBase(), below])
    return trainer


def seed(value):
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def resume(trainer, state, max_iter):
    trainer.load_state_dict(state)
    trainer.train(state["iteration"] + 1, max_iter)
    return trainer


def test_a_save_is_written_where_its_stage_ends():
    calls, above, below = [], SaveAt("before_step", 1), SaveAt("after_step", 1, BELOW)
    trainer = job(calls, above)
    trainer.register_hooks([below])
    below.calls = calls
    trainer.train(0, 2)
    assert [call[:3] for call in calls][above.calls_before - 1 :][:3] == [
        ("above", "after_step", 1),
        ("below", "after_step", 1),
        ("above", "after_epoch", 1),
    ]
    assert calls[below.calls_before][1] == "after_train"
    assert (above.state["iteration"], above.state["position"]["stage"]) == (1, 2)
    assert (below.state["iteration"], below.state["position"]["stage"]) == (1, 1)


def test_two_hooks_that_ask_for_one_file_get_it_once_and_outside_of_iterations_it_is_written_at_once():
    written = []

    class Ask(HookBase):
        def after_step(self):
            self.trainer.request_save("model", lambda: written.append(self.trainer.position))

        def after_train(self):
            self.trainer.request_save("model_final", lambda: written.append("end"))
            written.append("asked")

    Steps([Ask(), Ask()]).train(0, 1)
    assert written == [(0, 2), "end", "asked", "end", "asked"]


def test_a_checkpointer_of_the_trainer_saves_what_is_asked_for_by_name(tmp_path, caplog):
    model = Regression()
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    trainer.checkpointer = Checkpointer(model, tmp_path, trainer=trainer)
    asks = hooks.CallbackHook(before_step=lambda trainer: trainer.iter == 1 and trainer.request_save("mine"))
    (tmp_path / "full.pth").mkdir()  # nothing can be renamed to that
    trainer.register_hooks([asks, AfterStep(lambda trainer: trainer.request_save("full"))])
    trainer.train(0, 3)
    saved = torch.load(tmp_path / "mine.pth", weights_only=True)
    assert (saved["iteration"], saved["trainer"]["iteration"], saved["trainer"]["position"]["stage"]) == (1, 1, 2)
    assert caplog.text.count("The checkpoint 'full' is not saved, training continues: cannot write") == 3


def test_a_hook_that_saves_itself_is_warned_about_once_and_its_file_goes_on_with_the_next_iteration(tmp_path, caplog):
    def make(folder):
        model = Regression()
        trainer = SimpleTrainer(model, batches(8), sgd(model))
        trainer.checkpointer = Checkpointer(model, folder, trainer=trainer)
        return trainer

    whole = make("")
    whole.train(0, 6)
    trainer = make(tmp_path)
    trainer.register_hooks([AfterStep(lambda trainer: trainer.checkpointer.save(f"own_{trainer.iter}"))])
    trainer.train(0, 4)
    assert caplog.text.count("a run resumed from it is not exact") == 1
    assert "trainer.request_save(name)" in caplog.text

    resumed = make("")
    resumed.data_loader = batches(8)[4:]
    resumed.checkpointer.load(str(tmp_path / "own_3.pth"))
    assert resumed.last_done_iter == 3  # the weights have the update of iteration 3
    resumed.train(4, 6)
    assert torch.equal(resumed.model.linear.weight, whole.model.linear.weight)


# ---------------------------------------------------------------------- late hooks


@pytest.mark.parametrize("name", ["batch", "losses", "trained_losses"])
def test_below_the_save_point_what_belongs_to_the_step_is_gone_in_every_run(name):
    model = Regression()
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    read = []
    trainer.register_hooks([AfterStep(lambda trainer: read.append(getattr(trainer, name)))])
    trainer.register_hooks([AfterStep(lambda trainer: getattr(trainer, name))], priority=BELOW)
    with pytest.raises(RuntimeError, match=rf"trainer.{name} is there in after_backward.*register the hook with a"):
        trainer.train(0, 2)
    assert len(read) == 1


# ---------------------------------------------------------------------- how a run ends


def finish_at(iter):
    return AfterStep(lambda trainer: trainer.iter == iter and trainer.request_stop("good enough", finished=True))


@pytest.mark.parametrize(("point", "iter", "priority"), [("after_step", 2, 50), ("after_step", 2, BELOW)])
def test_a_run_that_has_finished_early_is_finished_by_the_resumed_one(point, iter, priority):
    def finishing(calls, save=None):
        trainer = Epochs(step=lambda iter: calls.append(iter))
        trainer.register_hooks([finish_at(2), save or HookBase(), Recorder("last", calls, BELOW)])
        return trainer

    save = SaveAt(point, iter, priority)
    whole = save.calls = []
    finishing(whole, save).train(0, 9)
    resumed = []
    trainer = resume(finishing(resumed), save.state, 9)

    assert [call[:3] for call in resumed[1:]] == [call[:3] for call in whole[save.calls_before :]]
    assert resumed[-1][1:3] == ("after_train", 3)
    assert (trainer.status, trainer.iter, trainer.max_iter) == ("finished", 3, 3)


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
    assert [call[1:3] for call in resumed if call[0] == "above"][1:3] == [
        ("before_step" if stop_at == 2 else "before_epoch", stop_at + 1),
        ("after_step" if stop_at == 2 else "before_step", stop_at + 1),
    ]


# ---------------------------------------------------------------------- with a model


def test_the_values_of_the_optimizer_are_those_of_the_checkpoint():
    model = Regression()
    state = SimpleTrainer(model, batches(2), sgd(model, lr=0.1, momentum=0.9, weight_decay=0.01)).state_dict()
    trainer = SimpleTrainer(model, batches(2), sgd(model, lr=0.1, momentum=0.5, weight_decay=0.01))
    trainer.load_state_dict(state)
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.9


def test_what_a_loader_cannot_give_back_is_named_at_the_start_of_a_run_that_saves(caplog, tmp_path):
    model = Regression()
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    trainer.train(0, 1)
    assert "may differ" not in caplog.text
    trainer.register_hooks([hooks.PeriodicCheckpointer(Checkpointer(model, tmp_path, trainer=trainer), 5)])
    trainer.train(1, 2)
    assert "A resumed run may differ from one that is never stopped: " in caplog.text
    assert "state_dict" in caplog.text


def test_the_random_state_of_another_number_of_processes_is_derived_from_the_checkpoint(caplog):
    caplog.set_level("INFO")
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
    assert "The checkpoint is of 2 ranks, now there are 1" in caplog.text
