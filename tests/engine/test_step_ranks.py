"""The step on two ranks: gradients exchanged once, sharded parameters, and the hooks that look for a broken step."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from trainkit.projects.non_finite.trainers import SkipNonFinite

from tests.engine.tiny import AfterStep, Regression, Weight, batches, metrics_by_worker, scalars, sgd
from tests.two_ranks import on_two_ranks
from trainkit.engine.amp import AMPTrainer
from trainkit.engine.parallel import create_ddp_model
from trainkit.engine.step import SimpleTrainer
from trainkit.solver import GradientClipper


def accumulation(rank, folder):
    """Exchanges so far after each iteration of three micro-batches, of epochs of four; the weights."""
    exchanged, counts = [], []

    def count(state, bucket):
        exchanged.append(bucket.is_last())
        return default_hooks.allreduce_hook(None, bucket)

    model = create_ddp_model(Regression())
    model.register_comm_hook(None, count)
    trainer = SimpleTrainer(model, batches(8)[rank::2], sgd(model), accumulation_steps=3)
    trainer.register_hooks([AfterStep(lambda trainer: counts.append(sum(exchanged)))])
    trainer.train(0, 4)
    return {"exchanges": counts, "weight": model.module.linear.weight.detach()}


def sharded(rank, folder):
    """The largest difference that sharding makes to norms and clipped gradients, by kind of clipping."""
    found = {}
    for kind in ("value", "norm", "full_model"):
        for norm_type in (2.0, math.inf):
            whole, parts = nn.Linear(3, 4), nn.Linear(3, 4)
            parts.load_state_dict(whole.state_dict())
            for parameter in whole.parameters():
                dist.broadcast(parameter.data, 0)
            parts.load_state_dict(whole.state_dict())
            fully_shard(parts)
            x = 3 * batches(1)[0][0]
            norms = []
            for model in (whole, parts):
                model(x).square().sum().backward()
                norms.append(GradientClipper(kind, 0.5, norm_type)(model.parameters()))
            assert type(norms[1]) is torch.Tensor  # and no part of one
            pairs = zip(whole.parameters(), parts.parameters(), strict=True)
            differences = [(a.grad - b.grad.full_tensor()).abs().max().item() for a, b in pairs]
            found[kind, norm_type] = max(*differences, abs(norms[0] - norms[1]).item() / norms[0].item())
    return found


def sharded_overflow(rank, folder):
    """Rank 1 alone overflows, in the second iteration."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = fully_shard(model)

        def forward(self, batch):
            return (self.model(torch.ones(2)).float() * batch).sum()

    loss = Loss()
    data = [torch.tensor(1.0), torch.tensor(1e6 if rank else 1.0), torch.tensor(1.0)]
    trainer = AMPTrainer(
        loss,
        data,
        sgd(loss, lr=0.25),
        grad_scaler=torch.amp.GradScaler("cpu", init_scale=4.0),
        clip_gradients=GradientClipper("full_model", 100.0),
    )
    weights = []
    trainer.register_hooks([AfterStep(lambda trainer: weights.append(model.weight.full_tensor()[0, 0].item()))])
    trainer.train(0, 3)
    stored = scalars(trainer)
    return {"weights": weights} | {name: [value for value, _ in stored[name]] for name in sorted(stored)[:2]}


def rank_1_alone(rank, values, at=(), trainer_class=SimpleTrainer, **kwargs):
    """Not wrapped in DDP; rank 1 gets ``values`` and rank 0 ones; ``check_finite`` behind the iterations ``at``."""
    model = Weight()
    data = [torch.tensor(value if rank else 1.0) for value in values]
    trainer = trainer_class(model, data, sgd(model, lr=0.25), **kwargs)
    reached = []
    trainer.register_hooks(
        [
            AfterStep(lambda trainer: trainer.check_finite() if trainer.iter in at else None),
            AfterStep(lambda trainer: reached.append(trainer.iter)),
        ]
    )
    try:
        trainer.train(0, len(values))
    except FloatingPointError as error:
        return {"error": str(error).partition(". Lower")[0], "on": str(error).rpartition(" (")[2], "reached": reached}
    return {"weight": model.weight.item(), "skipped": [value for value, _ in scalars(trainer)["skipped_updates"]]}


def nan_between_exchanges_before_a_check(rank, folder):
    kwargs = {"gather_metric_period": 4, "async_write_metrics": True}
    with metrics_by_worker():
        return rank_1_alone(rank, [1.0, math.nan, 1.0, 1.0, 1.0], at=[2], **kwargs)


def skipped_on_one_rank(rank, folder):
    return rank_1_alone(rank, [1.0, math.nan, 1.0, math.inf], at=[3], trainer_class=SkipNonFinite)


CHECKS = (
    accumulation,
    sharded,
    sharded_overflow,
    nan_between_exchanges_before_a_check,
    skipped_on_one_rank,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each check gave on each of two ranks: name -> [on rank 0, on rank 1]."""
    return on_two_ranks(CHECKS, tmp_path_factory.mktemp("ranks"))


def test_gradients_are_exchanged_once_per_iteration(ranks):
    for found in ranks["accumulation"]:
        assert found["exchanges"] == [1, 2, 3, 4]
    both = [found["weight"] for found in ranks["accumulation"]]
    assert torch.equal(*both)

    model = Regression()
    data = batches(8)
    windows = [(data * 3)[at : at + 6] for at in range(0, 24, 6)]
    joined = [tuple(torch.cat(tensors) for tensors in zip(*window, strict=True)) for window in windows]
    SimpleTrainer(model, joined, sgd(model)).train(0, 4)
    torch.testing.assert_close(both[0], model.linear.weight.detach(), atol=1e-6, rtol=0)
    assert not torch.allclose(both[0], Regression().linear.weight, atol=1e-2)


def test_sharded_gradients_are_clipped_as_whole_ones(ranks):
    for found in ranks["sharded"]:
        assert list(found) == [(kind, p) for kind in ("value", "norm", "full_model") for p in (2.0, math.inf)]
        assert max(found.values()) < 1e-6


def test_ranks_of_a_sharded_model_skip_the_same_update(ranks):
    expected = {"weights": [0.75, 0.75, 0.5], "grad_norm": [2.0, math.inf, 2.0], "skipped_updates": [0.0, 1.0, 1.0]}
    for found in ranks["sharded_overflow"]:
        assert found == {name: pytest.approx(values) for name, values in expected.items()}


def test_a_rank_that_alone_has_a_failure_raises_it_with_the_others_at_the_next_check(ranks):
    failure = {"error": "the loss is not finite in iteration 1: {'total_loss': nan}", "on": "on rank 1)"}
    assert ranks["nan_between_exchanges_before_a_check"] == [{**failure, "reached": [0, 1]}] * 2


def test_all_ranks_skip_the_update_that_one_of_them_cannot_make(ranks):
    assert ranks["skipped_on_one_rank"] == [{"weight": 0.5, "skipped": [0, 1, 1, 2]}] * 2
