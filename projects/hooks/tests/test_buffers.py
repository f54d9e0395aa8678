"""Buffers that are computed anew, and those that ranks average."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Steps, batches
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


def test_the_statistics_are_those_of_the_population_of_batches():
    """Several ranks are in tests/engine/test_metrics.py."""
    data = [x for x, _ in batches(5, size=40)]
    layer, exact = nn.BatchNorm1d(3), torch.stack(data).double()
    PreciseBN(1, layer, data, num_iter=100).update_stats()
    mean = exact.mean((0, 1))
    # the law of total variance: within the batches (torch's unbiased one), and between their means
    var = exact.var(1, correction=1).mean(0) + exact.mean(1).var(0, correction=0)
    found = layer.running_mean.double(), layer.running_var.double()
    torch.testing.assert_close(found, (mean, var), rtol=1e-5, atol=1e-6)


def test_nothing_but_the_running_statistics_is_touched():
    model = Net()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hook = PreciseBN(1, model, torch.randn(3, 4, 2, 6, 6), num_iter=3)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with EventStorage() as storage:
        hook.update_stats()
        assert storage.latest() == {}
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        f"{layer}.running_{kind}" for layer in ("first.1", "second") for kind in ("mean", "var")
    }
    assert all(torch.equal(p.grad, torch.full_like(p, 0.5)) for p in model.parameters())
    assert (model.first[1].momentum, model.second.momentum) == (0.1, None)
    assert all(module.training for module in model.modules())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


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
            seen.append((trainer.last_done_iter, model.training))

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
            inference_on_dataset(
                str, [torch.ones(())] * (2 - 2 * comm.get_rank()), None
            )  # rank 1 has no batch
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
