"""Buffers that are computed anew, and those that ranks average."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Steps
from tests.two_ranks import on_two_ranks
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import CallbackHook, EMAHook, EvalHook, PreciseBN, SyncBuffers
from trainkit.engine.step import SimpleTrainer
from trainkit.evaluation import inference_on_dataset
from trainkit.utils import comm
from trainkit.utils.events import EventStorage, get_event_storage


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5)
        )
        self.second = nn.BatchNorm1d(3, momentum=None)  # a cumulative average

    def forward(self, batch):
        get_event_storage().put_scalar("seen", 1.0)
        assert not torch.is_grad_enabled()
        random.random()
        np.random.rand()
        return self.second(self.first(batch).mean((2, 3)))


def statistics_of(values):
    """Mean and unbiased variance per channel of all values at once; channels are the second dimension."""
    flat = torch.cat([x.double().transpose(0, 1).flatten(1) for x in values], dim=1)
    return flat.mean(1), flat.var(1)


def found_in(layer):
    return layer.running_mean.double(), layer.running_var.double()


@pytest.mark.parametrize("sizes", [[8] * 20, [4] * 20, [396, 4], [2, 300, 17, 5], [64]])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (nn.BatchNorm1d, ()),
        (nn.BatchNorm1d, (5,)),
        (nn.BatchNorm2d, (3, 4)),
        (nn.BatchNorm3d, (2, 3, 1)),
        (lambda channels: nn.BatchNorm1d(channels, affine=False, momentum=None), ()),
    ],
)
def test_the_statistics_are_those_of_all_values_together(sizes, make, shape):
    """Each batch has another mean. Several ranks are in tests/engine/test_metrics.py."""
    torch.manual_seed(0)
    data = [torch.randn(size, 3, *shape) * 2 + i for i, size in enumerate(sizes)]
    layer = make(3)
    PreciseBN(1, layer, data, num_iter=len(data)).update_stats()
    torch.testing.assert_close(found_in(layer), statistics_of(data), rtol=1e-5, atol=1e-5)


def test_one_batch_gives_what_torch_stores_with_a_momentum_of_1():
    [data] = torch.randn(1, 9, 3)
    ours = nn.BatchNorm1d(3)
    theirs = nn.BatchNorm1d(3, momentum=1.0)
    theirs(data)
    PreciseBN(1, ours, [data], num_iter=1).update_stats()
    torch.testing.assert_close(found_in(ours), found_in(theirs), rtol=1e-6, atol=1e-6)


class Twice(nn.Module):
    """One layer for two inputs of different sizes, one layer in half of the batches, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.shared = nn.BatchNorm1d(3)
        self.sometimes = nn.BatchNorm1d(3)
        self.never = nn.BatchNorm1d(3)

    def forward(self, batch):
        number, first, second = batch
        self.shared(first)
        self.shared(second)
        if number % 2:
            self.sometimes(first)


def test_a_layer_that_is_called_twice_or_not_in_each_batch_has_the_statistics_of_what_it_saw(
    caplog,
):
    model = Twice()
    data = [(i, torch.randn(4 + i, 3) + i, torch.randn(30, 3) - i) for i in range(6)]
    PreciseBN(1, model, data, num_iter=6).update_stats()
    seen = [x for _, *both in data for x in both]
    torch.testing.assert_close(found_in(model.shared), statistics_of(seen), rtol=1e-5, atol=1e-5)
    seen = [first for number, first, _ in data if number % 2]
    torch.testing.assert_close(found_in(model.sometimes), statistics_of(seen), rtol=1e-5, atol=1e-5)
    assert model.never.running_var.tolist() == [1.0] * 3
    assert "no batch reached the layers ['never']" in caplog.text


def test_statistics_of_low_precision_are_summed_in_high_precision():
    data = torch.randn(50, 8, 2) + 30  # in bfloat16 a square of 30 has steps of 4
    layer = nn.BatchNorm1d(2).bfloat16()
    data = data.bfloat16()
    PreciseBN(1, layer, data, num_iter=50).update_stats()
    mean, var = statistics_of(data)
    assert layer.running_mean.tolist() == mean.bfloat16().tolist()
    torch.testing.assert_close(layer.running_var.double(), var, rtol=0.01, atol=0)


def test_a_compiled_model_has_the_same_statistics():
    data = [torch.randn(size, 3) + size for size in (4, 9, 5)]
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.compile(backend="eager")
    with torch.no_grad():
        model(data[0])  # compiled before the hook looks
    PreciseBN(1, model, data, num_iter=3).update_stats()
    torch.testing.assert_close(found_in(model[0]), statistics_of(data), rtol=1e-5, atol=1e-5)


class Loader:
    """Without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_fewer_batches_than_asked_are_an_error_and_change_nothing():
    data, layer = torch.randn(10, 8, 3), nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="20 batches .*NUM_ITER.* gives 10.*lower num_iter"):
        PreciseBN(1, layer, data, num_iter=20)  # its length is known
    hook = PreciseBN(1, layer, Loader(data), num_iter=20)
    with pytest.raises(ValueError, match="20 batches .*NUM_ITER.* gave 10.*lower num_iter"):
        hook.update_stats()
    assert layer.running_var.tolist() == [1.0] * 3


class Counter(nn.Module):
    """A queue beside batch norm, as methods of self-supervision have it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("queue", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch):
        self.queue = batch.mean(0)  # replaced
        self.calls += 1  # in place
        return self.norm(batch)


def test_other_buffers_are_as_before():
    model = Counter()
    queue = model.queue
    PreciseBN(1, model, torch.randn(4, 5, 3), num_iter=4).update_stats()
    assert model.queue is queue
    assert model.queue.tolist() == [0.0] * 3
    assert model.calls.item() == 0
    assert model.norm.num_batches_tracked.item() == 0
    assert model.norm.running_mean.abs().sum() > 0


def test_nothing_but_the_running_statistics_is_touched():
    model = Net()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hook = PreciseBN(1, model, torch.randn(3, 4, 2, 6, 6), num_iter=3)
    state_of_python = random.getstate()
    state_of_numpy = np.random.get_state()[1].tolist()
    state_of_torch = torch.get_rng_state()
    with EventStorage() as storage:
        hook.update_stats()
        assert storage.latest() == {}
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        f"{layer}.running_{kind}" for layer in ("first.1", "second") for kind in ("mean", "var")
    }
    assert all(torch.equal(p.grad, torch.full_like(p, 0.5)) for p in model.parameters())
    assert model.first[1].momentum == 0.1
    assert model.second.momentum is None
    assert all(module.training for module in model.modules())
    assert random.getstate() == state_of_python
    assert np.random.get_state()[1].tolist() == state_of_numpy
    assert torch.equal(torch.get_rng_state(), state_of_torch)


@pytest.mark.parametrize(("start", "expected"), [(0, [1, 3, 4]), (1, [0, 2, 4]), ("0.6ep", [2, 4])])
def test_it_runs_in_the_iterations_of_the_evaluations(tmp_path, start, expected):
    test = (
        "TEST.PRECISE_BN.NUM_ITER",
        1,
        "TEST.EVAL_START",
        start,
        "TEST.EVAL_PERIOD",
        2,
        "TEST.IMS_PER_BATCH",
        10,
    )
    options = ("TEST.PRECISE_BN.ENABLED", True, "SOLVER.MAX_ITER", 5, "SOLVER.STEPS", ())
    trainer, seen = DefaultTrainer(tiny_cfg(tmp_path, *test, *options)), []

    def note(model, inputs):
        if not torch.is_grad_enabled():
            seen.append((trainer.done - 1, model.training))

    trainer.model.register_forward_pre_hook(note)
    trainer.train()
    assert seen == [(iter, is_training) for iter in expected for is_training in (True, False)]


def test_without_batch_norm_in_train_mode_it_warns_and_does_nothing(caplog):
    model = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False))
    trainer = Steps([PreciseBN(1, model, None, num_iter=1)])
    assert "PreciseBN is off" in caplog.text
    trainer.train(0, 2)
    assert trainer.status == "finished"


class Counts(nn.Module):
    """Its buffers grow by rank + 1 in each step: apart from the others' as long as nobody averages them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(2, 1))
        self.register_buffer("wide", torch.zeros((), dtype=torch.float64), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, batch):
        for buffer in self.buffers():
            buffer += comm.get_rank() + 1
        return self.weight * batch


class Stream:
    def __iter__(self):
        return iter([torch.ones(())] * 2)


def run(iters, data, *hooks, averaging=None, eval_period=0):
    """The buffer ``mean`` after each step and at the end, and what each evaluation finds."""
    model, found, seen = Counts(), [], []
    trainer = SimpleTrainer(model, data, torch.optim.SGD(model.parameters(), lr=0.0))

    def evaluate():
        with (
            averaging.evaluated_models(model)[""] if averaging else nullcontext(model) as evaluated
        ):
            # rank 1 has no batch
            inference_on_dataset(str, [torch.ones(())] * (2 - 2 * comm.get_rank()), None)
            seen.append(evaluated.mean[0].item())

    evaluation = (
        [EvalHook(eval_period, evaluate, eval_after_train=averaging is None)] if eval_period else []
    )
    trainer.register_hooks([averaging, *hooks, *evaluation])
    trainer.register_hooks(
        [CallbackHook(after_step=lambda _: found.append(model.mean[0].item()))], priority="LOW"
    )
    trainer.train(0, iters)
    assert torch.equal(model.mean, model.mean[:1].expand(2, 1))
    assert model.wide.item() == model.mean[0].item()
    assert model.steps.item() == iters * (comm.get_rank() + 1)
    return seen if averaging else [*found, model.mean[0].item(), *seen]


def _means(rank, folder):
    two = [torch.ones(())] * 2
    return {
        "never": run(3, two),
        "each epoch and at the end": run(5, two, SyncBuffers()),
        "period": run(4, two, SyncBuffers(3)),
        "stream": run(3, Stream(), SyncBuffers()),
        "evaluation with": run(3, two, SyncBuffers(100), eval_period=2),
        "evaluation without": run(3, two, eval_period=2),
        "average with": run(3, Stream(), SyncBuffers(100), averaging=EMAHook(), eval_period=2),
        "average without": run(3, Stream(), averaging=EMAHook(), eval_period=2),
    }


def test_buffers_are_averaged_over_ranks_when_they_are_due(tmp_path):
    first, second = on_two_ranks([_means], tmp_path)["_means"]
    expected = {
        "never": ([1, 2, 3, 3], [2, 4, 6, 6]),
        # on rank 0, which adds 1 in each step; averages of 2, 4, ... steps are 3, 6, ...
        "each epoch and at the end": ([1, 3, 4, 6, 7.5, 7.5], [2, 3, 5, 6, 7.5, 7.5]),
        "period": ([1, 2, 4.5, 6, 6], [2, 4, 4.5, 6, 6]),
        "stream": ([1, 2, 4.5, 4.5], [2, 4, 4.5, 4.5]),
        # after the second step and at the end the evaluation finds averages
        "evaluation with": ([1, 3, 4.5, 4.5, 3, 4.5], [2, 3, 4.5, 4.5, 3, 4.5]),
        "evaluation without": ([1, 2, 3, 3, 2, 3], [2, 4, 6, 6, 4, 6]),
        "average with": ([3], [3]),
        "average without": ([2], [4]),
    }
    assert {name: (first[name], second[name]) for name in first} == expected
