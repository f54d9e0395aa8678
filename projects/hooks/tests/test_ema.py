"""Averages of weights, against formulas, printed values and torch."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from trainkit.projects.hooks import averaging
from trainkit.projects.hooks.averaging import ModelAverage, averaging_rule
from trainkit.projects.hooks.tests.test_family import Net

from tests.cuda import host_never_waits, needs_cuda
from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Weight, sgd
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer, file
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import EMAHook
from trainkit.engine.step import SimpleTrainer


class EveryTensor(nn.Module):
    """All kinds of tensors."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.layers[1].num_batches_tracked = None  # torch averages integers too, or fails
        self.tied = self.layers[0].weight
        self.small = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_the_weight_of_an_update_is_that_of_its_rule():
    for arguments, expected in [
        ({"decay": 0.9}, {0: 1, 1: 0.1, 9: 0.1}),
        ({"decay": 0.9, "interval": 2}, {0: 1, 1: 0, 2: 0.1}),
        (
            {"kind": "annealing", "decay": 0.9998},
            {1: 0.990099, 3: 0.970874, 499_900: 0.0002, 10_000_000: 0.0002},
        ),
        ({"kind": "annealing", "gamma": 1}, {3: 0.25}),
        ({"kind": "warmup", "decay": 0.9998}, {1: 0.9990007, 2000: 0.3678220, 10000: 0.0069332}),
        ({"kind": "warmup", "decay": 0.9998, "gamma": 1000}, {999: 0.3680059}),
        ({"kind": "mean"}, {1: 1 / 2, 2: 1 / 3}),
        (
            {"kind": "mmcv", "decay": 0.5, "gamma": 10},
            {1: 2 / 11, 2: 3 / 12, 3: 4 / 13, 8: 0.5, 9: 0.5},
        ),
        (
            {"kind": "mmcv", "decay": 0.5, "gamma": 10, "interval": 2},
            {1: 0, 2: 0.25, 3: 0, 8: 0.25},
        ),
        ({"kind": "mmcv", "decay": 0.9998}, {1: 0.0002, 100: 0.0002}),
    ]:
        rule = averaging_rule(**arguments)
        assert {steps: rule(steps) for steps in expected} == pytest.approx(expected, abs=1e-6), (
            arguments
        )


@pytest.mark.parametrize(
    ("rule", "multi_avg_fn"),
    [
        (averaging_rule(decay=0.3), get_ema_multi_avg_fn(0.3)),
        (averaging_rule("mean"), get_swa_multi_avg_fn()),
    ],
    ids=["decay", "mean"],
)
@pytest.mark.parametrize("average_buffers", [False, True])
def test_parameters_and_averaged_buffers_are_torchs_to_the_last_bit(
    rule, multi_avg_fn, average_buffers
):
    model = EveryTensor()
    ours = ModelAverage(model, rule, average_buffers=average_buffers)
    theirs = AveragedModel(model, multi_avg_fn=multi_avg_fn, use_buffers=average_buffers)
    for _ in range(6):
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(torch.rand(tensor.shape))
        model.cache = torch.ones(7)
        ours.update()
        model.cache = torch.ones(2)
        theirs.update_parameters(model)

    found, expected = ours.state_dict(), theirs.module.state_dict()
    assert found.keys() == model.state_dict().keys()
    names = [name for name in found if average_buffers or "running" not in name]
    assert all(torch.equal(found[name], expected[name]) for name in names)
    assert not torch.equal(model.state_dict()["tied"], found["tied"])  # the comparison can fail


@pytest.mark.parametrize("average_buffers", [False, True])
def test_buffers_are_averaged_or_copied_and_a_replaced_one_is_followed(average_buffers):
    model = nn.BatchNorm1d(2)
    average = ModelAverage(
        model, averaging_rule(decay=0.5, interval=2), average_buffers=average_buffers
    )
    found = []
    for count in range(1, 5):
        model.running_mean = torch.full((2,), 2.0**count)
        model.num_batches_tracked.fill_(count)
        average.update()
        state = average.state_dict()
        found.append((state["running_mean"][0].item(), state["num_batches_tracked"].item()))
    assert found == (
        [(2, 1), (2, 2), (5, 3), (5, 4)] if average_buffers else [(2, 1), (4, 2), (8, 3), (16, 4)]
    )


@needs_cuda
def test_on_cuda_an_update_never_waits():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).cuda()
    average = ModelAverage(model, averaging_rule())
    for _ in range(3):
        with host_never_waits():
            average.update()


def average_of(hook, model, prefix=""):
    with hook.evaluated_models(model)[prefix] as evaluated:
        return copy.deepcopy(evaluated)


def test_the_average_follows_the_updates():
    """Of a weight that is 0, -1, -2, ..., and that an evaluation does not change."""
    for arguments, expected in [
        ({"decay": 0.5, "begin": 1}, [0, -0.5, -1.25, -2.125, -3.0625]),
        ({"decay": 0.5, "begin": 3}, [0, -1, -2, -2.5, -3.25]),
        ({"kind": "mean", "begin": 3, "interval": 2}, [0, -1, -2, -2, -3]),
    ]:
        model, hook, found = Weight(), EMAHook(**arguments), []
        trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model, lr=1.0))
        note = AfterStep(
            lambda _, hook=hook, model=model, found=found: found.append(
                average_of(hook, model).weight
            )
        )
        trainer.register_hooks([hook, note])
        trainer.train(0, 5)
        assert [weight.item() for weight in found] == pytest.approx(expected, abs=1e-6)
        assert model.weight.item() == -4


class Job:
    """A trainer with the hook and a checkpointer; every iteration sees the same batch."""

    def __init__(self, folder, hook=None, *others):
        self.model, self.hook = Net(), hook
        self.trainer = SimpleTrainer(self.model, [torch.randn(4, 3)], sgd(self.model, momentum=0.9))
        self.checkpointer = Checkpointer(self.model, folder, trainer=self.trainer)
        self.trainer.register_hooks([hook, *others])
        self.checkpointer.resume_or_load("")

    def train(self, start_iter, max_iter):
        self.trainer.train(start_iter, max_iter)
        return self

    @property
    def average(self):
        return average_of(self.hook, self.model)


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("begin", "warned"), [(3, True), (4, False)])
def test_a_checkpoint_without_an_average_begins_one_with_one_warning(
    begin, warned, tmp_path, caplog
):
    Job(tmp_path).train(0, 3).checkpointer.save("model")
    job = Job(tmp_path, EMAHook(0.5, begin=begin)).train(3, 8)
    assert caplog.text.count("EMAHook has no average of the first 3 iterations") == warned
    assert job.hook.state_dict()["steps"] == 5


def test_an_average_that_would_begin_after_the_end_is_an_error_before_training(tmp_path):
    Job(tmp_path, EMAHook(begin=2)).train(0, 2)
    with pytest.raises(ConfigError, match="begin of EMAHook is 3, .* only 2 iterations"):
        Job(tmp_path, EMAHook(begin=3)).train(0, 2)


def test_a_checkpoint_has_the_trained_weights_and_the_average_which_is_evaluated_without_training(
    tmp_path,
):
    job = Job(tmp_path, EMAHook(0.5)).train(0, 5)
    job.checkpointer.save("model")
    state = file.read_file(tmp_path / "model.pth")
    assert all(
        torch.equal(value, state["model"][name]) for name, value in job.model.state_dict().items()
    )
    found = averaging.averaged_weights(state)
    assert all(torch.equal(value, found[name]) for name, value in job.average.state_dict().items())
    assert not torch.equal(found["layers.1.weight"], state["model"]["layers.1.weight"])
    loaded = Job(tmp_path, EMAHook(0.5, evaluate="both"))
    assert loaded.hook.state_dict()["steps"] == 5
    assert equal(loaded.average, job.average)
    assert equal(average_of(loaded.hook, loaded.model, "raw"), job.model)


def test_without_training_and_without_an_average_the_models_own_weights_are_evaluated(
    tmp_path, caplog
):
    job = Job(tmp_path, EMAHook(evaluate="both"))
    assert equal(job.average, job.model)
    assert "EMAHook has no averaged weights" in caplog.text


@pytest.mark.parametrize(("buffers", "is_copied"), [("copy", True), ("average", False)])
def test_copied_buffers_are_those_that_later_hooks_have_left(buffers, is_copied, tmp_path):
    fill = AfterStep(lambda trainer: trainer.model.layers[0].running_mean.fill_(trainer.iter))
    job = Job(tmp_path, EMAHook(0.5, buffers=buffers), fill).train(0, 3)
    saved = job.hook.state_dict()["model"]["layers.0.running_mean"].clone()
    assert torch.equal(saved, job.average.layers[0].running_mean)
    assert torch.equal(saved, torch.full((3,), 2.0)) == is_copied


def test_the_model_has_its_own_weights_again_after_an_evaluation_and_is_not_saved_during_it(
    tmp_path,
):
    job = Job(tmp_path, EMAHook(0.5)).train(0, 3)
    before = copy.deepcopy(job.model)
    with job.hook.evaluated_models(job.model)[""] as evaluated:
        assert not equal(evaluated, before)
        with pytest.raises(RuntimeError, match="cannot be saved"):
            job.checkpointer.save("model")
    assert equal(job.model, before)


def test_a_best_file_by_a_metric_of_the_models_own_weights_holds_those(tmp_path):
    both = ["HOOKS", [{"NAME": "EMAHook", "EVALUATE": "both"}]]
    DefaultTrainer(
        tiny_cfg(tmp_path, "CHECKPOINT.BEST_METRIC", "raw/classification/top1", *both)
    ).train()
    assert file.read_file(tmp_path / "model_best.pth")["evaluated"] == "model"


def _average(rank, folder):
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(Net(), broadcast_buffers=False)
    trainer = SimpleTrainer(ddp, [torch.full((2, 3), float(rank + 1)).cumsum(0)], sgd(ddp))
    trainer.register_hooks([hook := EMAHook(0.5)])
    trainer.train(0, 3)
    return hook.state_dict()


def test_every_rank_has_the_same_averaged_parameters_and_buffers_of_its_own(tmp_path):
    first, second = on_two_ranks([_average], tmp_path)["_average"]
    assert first["steps"] == second["steps"] == 3
    different = {
        name
        for name, value in first["model"].items()
        if not torch.equal(value, second["model"][name])
    }
    assert different == {"layers.0.running_mean", "layers.0.running_var"}
