import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainkit.projects.hooks import averaged

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Weight, sgd
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer, file
from trainkit.config import CfgNode, ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import CallbackHook, EMAHook
from trainkit.engine.step import SimpleTrainer

ITERS = 8


def average_of(hook, model, prefix=""):
    with hook.evaluated_models(model)[prefix] as evaluated:
        return evaluated


def falling(hook, max_iter=5):
    """The average after each iteration of a run whose weight is 0, -1, -2, ..."""
    model = Weight()
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model, lr=1.0))
    found = []
    note = AfterStep(lambda trainer: found.append(average_of(hook, model).weight.item()))
    trainer.register_hooks([hook, note])
    trainer.train(0, max_iter)
    assert model.weight.item() == 1 - max_iter
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"decay": 0.5}, [0, -0.5, -1.25, -2.125, -3.0625]),
        ({"decay": 0.75}, [0, -0.25, -0.6875, -1.265625, -1.94921875]),
        ({"decay": 0.5, "begin": 1}, [0, -0.5, -1.25, -2.125, -3.0625]),
        ({"decay": 0.5, "begin": 3}, [0, -1, -2, -2.5, -3.25]),
        ({"decay": 0.5, "interval": 2}, [0, 0, -1, -1, -2.5]),
        ({"kind": "annealing", "decay": 0.75, "gamma": 1}, [0, -0.5, -1, -1.5, -2.125]),
        ({"kind": "mean"}, [0, -0.5, -1, -1.5, -2]),
        ({"kind": "mean", "begin": 3, "interval": 2}, [0, -1, -2, -2, -3]),
    ],
    ids=str,
)
def test_the_average_follows_the_updates(arguments, expected):
    assert falling(EMAHook(**arguments)) == pytest.approx(expected, abs=1e-6)


class Net(nn.Module):
    """A batch is ``[N, 3]``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))

    def forward(self, batch):
        return (self.layers(batch) - 1).square().mean()


class Job:
    """A trainer with the hook and a checkpointer; every iteration sees the same batch."""

    def __init__(self, folder, hook=None, seed=0, wrap=lambda model: model):
        torch.manual_seed(seed)
        self.model = Net()
        self.hook = hook
        data = [torch.randn(4, 3, generator=torch.Generator().manual_seed(1))]
        self.trainer = SimpleTrainer(wrap(self.model), data, sgd(self.model, momentum=0.9))
        self.checkpointer = Checkpointer(self.model, folder, trainer=self.trainer)
        self.trainer.register_hooks([hook])

    def resume(self):
        self.checkpointer.resume_or_load("")
        return self

    def train(self, max_iter=ITERS, start_iter=None, stop_after=None):
        """A run that is stopped is saved."""
        if stop_after is not None:
            stop = AfterStep(lambda trainer: trainer.iter + 1 == stop_after and trainer.request_stop("enough"))
            self.trainer.register_hooks([stop])
        self.trainer.train(self.trainer.iter + 1 if start_iter is None else start_iter, max_iter)
        if stop_after is not None:
            self.checkpointer.save("model")
        return self

    @property
    def average(self):
        return average_of(self.hook, self.model)


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------- state


def test_a_state_that_waits_for_the_run_is_not_lost(tmp_path):
    first = Job(tmp_path, EMAHook(0.5)).train(ITERS, 0, stop_after=3)
    second = Job(tmp_path, EMAHook(0.5)).resume()
    assert second.hook.state_dict()["steps"] == 3
    assert second.hook.state_dict()["model"].keys() == first.model.state_dict().keys()
    assert EMAHook().state_dict() == {}


def test_that_the_average_was_evaluated_is_known_after_a_resume_too():
    hook, resumed = EMAHook(), EMAHook()
    hook.trainer = SimpleNamespace(model=nn.Linear(1, 1), start_iter=0, iter=1, max_iter=10, hooks=[])
    hook.before_train()
    hook.after_step()
    hook.evaluated_models(hook.trainer.model)
    resumed.load_state_dict(hook.state_dict())

    assert (hook.was_evaluated, resumed.was_evaluated, EMAHook().was_evaluated) == (True, True, False)


def test_a_second_run_begins_a_new_average_and_one_that_goes_on_continues_it(tmp_path):
    once = Job(tmp_path, EMAHook(0.5)).train(ITERS, 0)
    twice = Job(tmp_path, EMAHook(0.5)).train(3, 0).train(ITERS, 3)
    assert equal(twice.average, once.average)
    twice.train(1, 0)
    assert twice.hook.state_dict()["steps"] == 1
    assert equal(twice.average, twice.model)


def test_weights_that_are_loaded_without_the_rest_begin_the_average(tmp_path):
    Job(tmp_path / "old", EMAHook(0.5)).train(ITERS, 0, stop_after=3)
    new = Job(tmp_path / "new", EMAHook(0.5, begin=2), seed=9)
    new.checkpointer.resume_or_load(tmp_path / "old/model.pth")
    seen = []
    new.trainer.register_hooks([CallbackHook(before_train=lambda _: seen.append(equal(new.average, new.model)))])
    new.train(2, 0)
    assert seen == [True]
    assert new.hook.state_dict()["steps"] == 1


@pytest.mark.parametrize(("begin", "warned"), [(0, True), (3, True), (4, False)])
def test_a_checkpoint_without_an_average_begins_one_with_one_warning(begin, warned, tmp_path, caplog):
    Job(tmp_path).train(ITERS, 0, stop_after=3)
    job = Job(tmp_path, EMAHook(0.5, begin=begin)).resume().train()
    messages = [record.getMessage() for record in caplog.records if record.name == "trainkit.projects.hooks.ema"]
    warning = "EMAHook has no average of the first 3 iterations; it starts with the model"
    assert messages == ([warning] if warned else [])
    assert job.hook.state_dict()["steps"] == 5


def test_the_saved_average_of_another_model_is_an_error_that_names_the_tensors():
    job = Job("", EMAHook())
    job.hook.load_state_dict({"model": {"layers.9.weight": torch.ones(1)}, "steps": 3})
    with pytest.raises(ValueError, match=r"(?s)average of EMAHook is of another model.*unexpected *layers.9.weight"):
        job.train(5, 3)


def test_a_checkpoint_has_the_trained_weights_as_the_model_and_the_average_beside_them(tmp_path):
    job = Job(tmp_path, EMAHook(0.5)).train(ITERS, 0, stop_after=5)
    state = file.read_file(tmp_path / "model.pth")
    assert all(torch.equal(value, state["model"][name]) for name, value in job.model.state_dict().items())
    found = averaged.averaged_weights(state)
    assert found is state["trainer"]["hooks"]["EMAHook"]["model"]
    assert all(torch.equal(value, found[name]) for name, value in job.average.state_dict().items())
    assert not torch.equal(found["layers.1.weight"], state["model"]["layers.1.weight"])


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize(("buffers", "is_copied"), [("copy", True), ("average", False)])
def test_copied_buffers_are_those_that_hooks_behind_it_have_left(buffers, is_copied, tmp_path):
    job = Job(tmp_path, EMAHook(0.5, buffers=buffers))
    job.trainer.register_hooks([AfterStep(lambda trainer: job.model.layers[0].running_mean.fill_(trainer.iter))])
    job.train(3, 0)
    saved = job.hook.state_dict()["model"]["layers.0.running_mean"].clone()
    assert torch.equal(saved, job.average.layers[0].running_mean)
    assert torch.equal(saved, torch.full((3,), 2.0)) == is_copied


def test_without_training_the_average_is_that_of_the_checkpoint(tmp_path):
    trained = Job(tmp_path, EMAHook(0.5)).train(ITERS, 0, stop_after=3)
    loaded = Job(tmp_path, EMAHook(0.5, evaluate="both"), seed=9).resume()
    assert equal(loaded.average, trained.average)
    assert equal(average_of(loaded.hook, loaded.model, "raw"), trained.model)
    assert not equal(trained.average, trained.model)


def test_without_training_and_without_an_average_the_models_own_weights_are_evaluated(tmp_path, caplog):
    job = Job(tmp_path, EMAHook(evaluate="both"))
    assert job.average is job.model
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "EMAHook has no averaged weights" in caplog.text


def test_what_wraps_the_model_is_not_averaged(tmp_path):
    plain = Job(tmp_path, EMAHook(0.5)).train(3, 0)
    wrapped = Job(tmp_path, EMAHook(0.5), wrap=nn.DataParallel).train(3, 0)
    assert type(wrapped.average) is Net
    assert equal(wrapped.average, plain.average)


# ---------------------------------------------------------------------- errors


def test_an_average_that_would_never_begin_is_an_error_before_the_first_iteration(tmp_path):
    job = Job(tmp_path, EMAHook(begin=9))
    with pytest.raises(ValueError, match="begin of EMAHook is 9, but the run has only 8 iterations"):
        job.train(8, 0)
    assert job.trainer.iter == 0
    job.train(9, 0)


def test_the_first_part_of_a_longer_run_may_end_before_the_average_begins(tmp_path):
    job = Job(tmp_path, EMAHook(begin=9))
    job.trainer.cfg = CfgNode({"SOLVER": {"MAX_ITER": 9}})
    job.train(4, 0)
    job.train(9, 4)
    job.trainer.cfg = CfgNode({"SOLVER": {"MAX_ITER": 8}})
    with pytest.raises(ValueError, match="but the run has only 8 iterations"):
        job.train(4, 0)


# ---------------------------------------------------------------------- ranks


def _average(rank, folder):
    model = Net()
    with torch.no_grad():
        model.layers[1].weight.fill_(0.5)
        model.layers[1].bias.zero_()
    ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    hook = EMAHook(0.5)
    trainer = SimpleTrainer(ddp, [torch.full((2, 3), float(rank + 1)).cumsum(0)], sgd(model))
    trainer.register_hooks([hook])
    trainer.train(0, 3)
    return hook.state_dict()


def test_every_rank_has_the_same_averaged_parameters_and_buffers_of_its_own(tmp_path):
    first, second = on_two_ranks([_average], tmp_path)["_average"]
    assert first["steps"] == second["steps"] == 3
    different = {name for name, value in first["model"].items() if not torch.equal(value, second["model"][name])}
    assert different == {"layers.0.running_mean", "layers.0.running_var"}


def test_two_hooks_that_offer_an_average_are_an_error_and_one_of_them_may_be_raw(tmp_path):
    entries = [{"NAME": "EMAHook"}, {"NAME": "EMAHook", "DECAY": 0.5}]
    with pytest.raises(ConfigError, match="two EMAHooks offer an average to evaluate"):
        DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", entries)).train()
    entries[1]["EVALUATE"] = "raw"
    DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", entries)).train(max_iter=1)


def test_a_metric_of_the_models_own_weights_may_be_looked_at_where_both_are_evaluated(tmp_path):
    both = ["HOOKS", [{"NAME": "EMAHook", "EVALUATE": "both"}]]
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "CHECKPOINT.BEST_METRIC", "raw/classification/top1", *both))
    trainer.train()
    assert (tmp_path / "model_best.pth").exists()
