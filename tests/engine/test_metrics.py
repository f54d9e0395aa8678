"""The way of a loss in one process; of two ranks, everything of the trainers and hooks that they must agree on."""

import contextlib
import logging
import math
import os
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from trainkit.projects.non_finite.policies import SkipNonFinite

from tests.cuda import needs_cuda
from tests.engine.tiny import (
    AfterStep,
    Regression,
    Weight,
    batches,
    metrics_by_worker,
    scalars,
    sgd,
)
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer
from trainkit.engine.hooks import (
    BestCheckpointer,
    CallbackHook,
    EarlyStopping,
    EvalHook,
    PeriodicCheckpointer,
    PeriodicWriter,
    PreciseBN,
)
from trainkit.engine.losses import parse_losses
from trainkit.engine.metrics import write_metrics
from trainkit.engine.parallel import create_ddp_model
from trainkit.engine.step import SimpleTrainer
from trainkit.solver import GradientClipper
from trainkit.utils.events import EventStorage
from trainkit.utils.periods import Period


def test_the_total_is_added_up_in_the_order_of_the_entries():
    big, small = (torch.tensor(value, requires_grad=True) for value in (1e8, 1.0))
    assert parse_losses({"a": small, "b": big, "c": -big}).total.item() == 0.0
    assert parse_losses({"b": big, "c": -big, "a": small}).total.item() == 1.0


@needs_cuda
@pytest.mark.parametrize("asynchronous", [False, True])
def test_entries_on_another_device_than_the_loss_are_stored_too(asynchronous):
    model = Weight(
        lambda weight, batch: {"loss_a": weight * batch, "accuracy": torch.tensor(50.0)}
    ).cuda()
    trainer = SimpleTrainer(
        model, [torch.tensor(2.0)], sgd(model, lr=0.0), async_write_metrics=asynchronous
    )
    trainer.train(0, 2)
    assert scalars(trainer) == {
        "total_loss": [(2.0, 0), (2.0, 1)],
        "loss_a": [(2.0, 0), (2.0, 1)],
        "accuracy": [(50.0, 0), (50.0, 1)],
    }


def names(rank, folder):
    """Each step has other names on the ranks: the same, in another order, others, more of them, a hundred."""
    script = [
        {"a": 1.0 + rank, "b": 0.0},
        {"a": 2.0, "b": 4.0} if rank else {"b": 2.0, "a": 4.0},
        {"ab"[rank]: 2.0 + 3 * rank, "c7": 0.0},
        {"a": 2.0, "c7": 0.0} if rank else {"a": 4.0, "b": 6.0, "c7": 1.0},
        {f"c{i}": i + 2.0 * rank for i in range(100)},
        {"c7": 0.0, "c8": 0.0} if rank else {f"c{i}": float(i) for i in range(100)},
    ]
    model = Weight(
        lambda weight, batch: {name: weight * value for name, value in script[int(batch)].items()}
    )
    data = [torch.tensor(i) for i in range(len(script))]
    trainer = SimpleTrainer(model, data, sgd(model, lr=0.0), exchange_period=4)
    trainer.train(0, len(script))
    return {
        name: values
        for name, values in scalars(trainer).items()
        if name in ("total_loss", "a", "b", "c7", "c99")
    }


def single_names(rank, folder):
    """A loss that is alone on a rank has its name on the other rank too, or another name, or none."""

    def compute(weight, batch):
        scripts = [
            ({"loss": weight}, {"loss": 2 * weight}),
            ({"loss": weight}, {"loss": 2 * weight, "loss_extra": 4 * weight}),
            ({"a": weight}, {"b": 3 * weight}),
            (weight, {"loss": 5 * weight}),
            ({"loss": 2 * weight}, {"loss": 4 * weight, "accuracy": torch.tensor(50.0)}),
            ({"x": weight, "y": weight}, {"loss": 6 * weight}),
        ]
        return scripts[int(batch)][rank]

    def stored(data, **kwargs):
        model = Weight(compute)
        trainer = SimpleTrainer(
            model, [torch.tensor(i) for i in data], sgd(model, lr=0.0), **kwargs
        )
        trainer.train(0, len(data) // kwargs.get("accumulation_steps", 1))
        return scalars(trainer)

    with EventStorage() as storage:
        own = {"loss": torch.tensor(1.0 + rank)}
        write_metrics(own | ({"loss_extra": torch.tensor(4.0)} if rank else {}), 0.0, 7, "head/")
        written = {name: values for name, values in storage.latest().items() if "loss" in name}
    return {
        "each": stored(range(6)),
        "in a block": stored(range(6), exchange_period=4, async_write_metrics=True),
        "accumulated": stored([0, 1], accumulation_steps=2),
        "written": written,
    }


def losses(rank, folder):
    """Mean losses and maximal data_time in each rank's storage."""
    model = create_ddp_model(
        Weight(lambda weight, batch: {"loss_a": weight * batch, "number": batch + 1})
    )
    trainer = SimpleTrainer(
        model, [torch.tensor(float(rank))], sgd(model, lr=0.0), gather_metric_period=3
    )
    trainer.train(0, 6)
    period = Period(Fraction(12, 5))  # 2 iterations, and then 3
    SimpleTrainer(model, [torch.tensor(1.0)], sgd(model, lr=0.0), exchange_period=period).train(
        0, 6
    )
    times = {
        name: [sec for sec, _ in trainer.storage.history(name).values()]
        for name in ("data_time", "rank_data_time")
    }
    return {
        "scalars": scalars(trainer),
        "slowest": times["data_time"],
        "own": times["rank_data_time"],
    }


def seen_by_one_rank(rank, folder):
    """In iteration 6 both ranks look for failures; rank 0 alone reads the storage after each iteration."""
    found = []
    for asynchronous in (False, True):
        model = Weight(
            lambda weight, batch: {"loss": weight * batch, "small" if batch < 8 else "large": batch}
        )
        data = [torch.tensor(float(10 * rank + i)) for i in range(10)]
        kwargs = {"exchange_period": 4, "async_write_metrics": asynchronous}
        trainer, seen = SimpleTrainer(model, data, sgd(model, lr=0.0), **kwargs), []

        def look(trainer, seen=seen):
            if trainer.iter == 6:
                trainer.check_finite()
            if rank == 0:
                seen.append(trainer.storage.latest().get("total_loss", (0, None))[1])

        trainer.register_hooks([AfterStep(look)])
        with metrics_by_worker():
            trainer.train(0, 10)
        found.append({"seen": seen, "scalars": scalars(trainer)})
    return found


def failure_on_each_rank(rank, folder):
    """Asynchronously: both ranks fail, at the same time and each by itself, and nobody waits for the timeout."""
    model, seen = create_ddp_model(Weight()), []
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model), async_write_metrics=True)
    read = CallbackHook(
        after_train=lambda t: seen.append(t.storage.history("total_loss").values()[-1][1])
    )
    fail = AfterStep(lambda trainer: trainer.iter == 2 and 1 / 0)
    trainer.register_hooks([fail, read, PeriodicWriter([], period=20)])
    with metrics_by_worker(), contextlib.suppress(ZeroDivisionError):
        trainer.train(0, 30)
    return trainer.status, seen


def hooks_of_one_rank(rank, folder):
    texts, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage().splitlines()[0])
    logging.getLogger("trainkit.engine.hook_list").addHandler(handler)
    model = Weight()
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model))
    trainer.train(0, 1)
    trainer.register_hooks([CallbackHook(after_step=lambda t: None) if rank == 0 else None])
    trainer.train(0, 1)
    logging.getLogger("trainkit.engine.hook_list").removeHandler(handler)
    return texts


def decisions(rank, folder):
    """Rank 0 alone has results."""
    results, noted, model = iter([40.0, 50.0, 70.0, 60.0, 65.0, 80.0]), [], Regression()
    trainer = SimpleTrainer(model, batches(4), sgd(model), async_write_metrics=True)
    checkpointer = Checkpointer(model, os.path.join(folder, f"checkpoints{rank}"), trainer=trainer)
    note = CallbackHook(before_save=lambda trainer, state: noted.append(trainer.iter))
    trainer.register_hooks(
        [
            PeriodicCheckpointer(checkpointer, 4, max_to_keep=1),
            EvalHook(3, lambda: {"top1": next(results)} if rank == 0 else None, eval_at_start=True),
            BestCheckpointer(2, checkpointer, "top1"),  # also without an evaluation just before
            EarlyStopping(1, "top1", patience=2),
            PeriodicWriter([], period=4),
            note,
        ]
    )
    with metrics_by_worker():
        trainer.train(0, 30)
    return {
        "iter": trainer.iter,
        "max_iter": trainer.max_iter,
        "status": trainer.status,
        "saves": noted,  # on all ranks: a state may be gathered over them
        "stored": len(trainer.storage.history("total_loss").values()),
        "files": sorted(os.listdir(checkpointer.save_dir))
        if os.path.exists(checkpointer.save_dir)
        else [],
    }


DATA = [
    torch.arange(12.0).reshape(6, 2).square(),
    torch.tensor([[-3.0, 1.0], [5.0, 9.0]]),
    torch.ones(4, 2),
    torch.tensor([[2.0, -7.0], [4.0, 3.0], [0.5, 8.0]]),
]


def statistics(data):
    model = nn.Sequential(nn.BatchNorm1d(2))
    PreciseBN(1, model, data, num_iter=2).update_stats()
    return {"mean": model[0].running_mean.tolist(), "var": model[0].running_var.tolist()}


def precise_bn(rank, folder):
    found = {"statistics": statistics(DATA[:2] if rank == 0 else DATA[2:])}
    try:
        statistics(iter(DATA[rank:2]))
    except ValueError as error:
        found["error"] = str(error)
    return found


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
    for kind, norm_type in (
        ("value", 2.0),
        ("norm", 2.0),
        ("full_model", 2.0),
        ("full_model", math.inf),
    ):
        whole, parts = nn.Linear(3, 4), nn.Linear(3, 4)
        for parameter in whole.parameters():
            dist.broadcast(parameter.data, 0)
        parts.load_state_dict(whole.state_dict())
        fully_shard(parts)
        x = 3 * batches(1)[0][0]
        norms = []
        for model in (whole, parts):
            model(x).square().sum().backward()
            with CommDebugMode() as mode:
                norms.append(GradientClipper(kind, 0.5, norm_type)(model.parameters()))
        pairs = zip(whole.parameters(), parts.parameters(), strict=True)
        differences = [(a.grad - b.grad.full_tensor()).abs().max().item() for a, b in pairs]
        if kind == "value":
            assert norms == [None, None]
            assert mode.get_total_counts() == 0
        else:
            assert mode.get_total_counts() == 1  # for any number of parameters
            assert type(norms[1]) is torch.Tensor  # and no part of one
            differences.append(abs(norms[0] - norms[1]).item() / norms[0].item())
        found[kind, norm_type] = max(differences)
    return found


def rank_1_alone(rank, values, check_after=None, **kwargs):
    """Rank 1 gets ``values``, and rank 0 what is not finite one step later: what happened, and the failure if any."""
    model = Weight()
    data = [
        torch.tensor(value if rank else max(former, 1.0))
        for former, value in pairwise([1.0, *values])
    ]
    trainer = SimpleTrainer(model, data, sgd(model, lr=0.25), **kwargs)
    trainer.register_hooks(
        [AfterStep(lambda trainer: trainer.iter == check_after and trainer.check_finite())]
    )
    error = ""
    try:
        with metrics_by_worker():
            trainer.train(0, len(values))
    except FloatingPointError as raised:
        error = str(raised)
    stored = scalars(trainer)
    return {
        "error": error,
        "status": trainer.status,
        "iter": trainer.iter,
        "weight": model.weight.item(),
        "stored": [iter for _, iter in stored.get("total_loss", [])],
        "skipped": [value for value, _ in stored.get("skipped_updates", [])],
    }


def alone(rank, folder):
    ones, nan = [1.0] * 5, [1.0, math.nan, 1.0, 1.0, 1.0]
    return {
        "at once": rank_1_alone(rank, nan),
        "asynchronously": rank_1_alone(rank, nan, async_write_metrics=True),
        "before the exchange": rank_1_alone(rank, [*ones[:2], math.nan, *ones], exchange_period=4),
        "before a check": rank_1_alone(
            rank, nan, 2, gather_metric_period=4, async_write_metrics=True
        ),
        "skipped": rank_1_alone(rank, [*nan[:3], math.inf], 3, non_finite=SkipNonFinite()),
    }


CHECKS = [
    accumulation,
    sharded,
    names,
    single_names,
    losses,
    seen_by_one_rank,
    alone,
    failure_on_each_rank,
]
CHECKS += [hooks_of_one_rank, decisions, precise_bn]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each check gave on each of two ranks: name -> [on rank 0, on rank 1]."""
    return on_two_ranks(CHECKS, tmp_path_factory.mktemp("ranks"))


def test_ranks_share_means_of_whatever_names_they_have(ranks):
    expected = {
        "total_loss": [(1.5, 0), (6.0, 1), (3.5, 2), (6.5, 3), (5050.0, 4), (2475.0, 5)],
        "a": [(1.5, 0), (3.0, 1), (2.0, 2), (3.0, 3)],
        "b": [(0.0, 0), (3.0, 1), (5.0, 2), (6.0, 3)],
        "c7": [(0.0, 2), (0.5, 3), (8.0, 4), (3.5, 5)],
        "c99": [(100.0, 4), (99.0, 5)],
    }
    assert ranks["names"] == [expected, expected]


def test_a_single_loss_is_averaged_under_its_name_over_the_ranks_that_have_it(ranks):
    expected = {
        "total_loss": [(1.5, 0), (3.5, 1), (2.0, 2), (3.0, 3), (3.0, 4), (4.0, 5)],
        # not in iteration 0: the same single loss on both ranks is the total
        "loss": [(1.5, 1), (5.0, 3), (3.0, 4), (6.0, 5)],
        "loss_extra": [(4.0, 1)],
        "a": [(1.0, 2)],
        "b": [(3.0, 2)],
        "accuracy": [(50.0, 4)],
        "x": [(1.0, 5)],
        "y": [(1.0, 5)],
    }
    for found in ranks["single_names"]:
        assert found["each"] == found["in a block"] == expected
        # rank 0: 1 and 1; rank 1: 2, and 2 with an extra 4, which counts as 0 where it is not
        assert found["accumulated"] == {
            "total_loss": [((1.0 + 4.0) / 2, 0)],
            "loss": [((1.0 + 2.0) / 2, 0)],
            "loss_extra": [(2.0, 0)],
        }
        assert found["written"] == {
            "head/total_loss": (3.5, 7),
            "head/loss": (1.5, 7),
            "head/loss_extra": (4.0, 7),
        }


def test_metrics_are_exchanged_in_the_same_iterations_on_every_rank_and_reading_exchanges_nothing(
    ranks,
):
    stored = {
        "total_loss": [(i + 5.0, i) for i in range(10)],
        "loss": [(i + 5.0, i) for i in range(10)],
        "small": [(float(i), i) for i in range(8)],  # of rank 0 alone
        "large": [(i + 10.0, i) for i in range(8)] + [(i + 5.0, i) for i in (8, 9)],
    }
    # after the exchanges of iteration 3, of the check in iteration 6, of iteration 7 and of the last one
    for rank, seen in enumerate([[None, None, None, 3, 3, 3, 6, 7, 7, 9], []]):
        assert ranks["seen_by_one_rank"][rank] == 2 * [{"seen": seen, "scalars": stored}]


def test_a_rank_that_fails_has_its_metrics_without_waiting_for_others(ranks):
    assert ranks["failure_on_each_rank"] == [("failed", [2])] * 2


def test_a_hook_that_only_some_ranks_have_is_warned_about(ranks):
    for messages in ranks["hooks_of_one_rank"]:
        [text] = messages
        assert text.startswith("Rank 1 has other hooks than rank 0")


def test_ranks_store_the_same_mean_losses_and_their_own_data_time(ranks):
    expected = {
        "total_loss": [(0.5, 2), (0.5, 5)],
        "loss_a": [(0.5, 2), (0.5, 5)],
        "number": [(1.5, 2), (1.5, 5)],
    }
    first, second = ranks["losses"]
    assert first["scalars"] == second["scalars"] == expected
    slowest = [max(pair) for pair in zip(first["own"], second["own"], strict=True)]
    assert first["slowest"] == second["slowest"] == slowest


def test_a_loss_that_is_not_finite_on_one_rank_raises_on_all_at_the_next_exchange_or_check(ranks):
    first, second = ranks["alone"]
    for found in (first, second):
        for case, each in found.items():
            if case == "skipped":
                assert each["error"] == ""
                continue
            iter = 2 if case == "before the exchange" else 1
            assert each["status"] == "failed"
            assert f"not finite in iteration {iter}: {{'total_loss': nan}}" in each["error"]
            assert each["error"].endswith("on rank 1)")
        assert found["at once"]["iter"] == 1
        assert found["at once"]["weight"] == 0.75  # before the update
        assert found["before the exchange"]["iter"] == 3
        assert found["before the exchange"]["stored"] == [0, 1]
        assert found["before a check"]["iter"] == 2
        assert found["skipped"]["status"] == "finished"
        assert found["skipped"]["iter"] == 4
        assert found["skipped"]["weight"] == 0.75
        assert found["skipped"]["skipped"] == [0, 1, 2, 3]


def test_all_ranks_follow_rank_0_in_what_is_best_and_when_to_stop_and_rank_0_writes(ranks):
    expected = {
        "iter": 12,
        "max_iter": 12,
        "status": "finished",
        "saves": [1, 3, 3, 5, 7, 11, 12],
        "stored": 12,
    }
    files = ["last_checkpoint", "model_0000011.pth", "model_best.pth", "model_final.pth", "run_id"]
    assert ranks["decisions"] == [{**expected, "files": files}, {**expected, "files": []}]


def test_precise_bn_gives_every_rank_the_statistics_of_all_values_of_all_ranks(ranks):
    values = torch.cat(DATA).double()
    for found in ranks["precise_bn"]:
        assert found["statistics"]["mean"] == pytest.approx(values.mean(0).tolist(), rel=1e-6)
        assert found["statistics"]["var"] == pytest.approx(values.var(0).tolist(), rel=1e-6)
        assert "gave 1 on some rank" in found["error"]  # on both, though one had enough
    assert ranks["precise_bn"][0] == ranks["precise_bn"][1]


def test_gradients_are_exchanged_once_per_iteration(ranks):
    for found in ranks["accumulation"]:
        before = 2  # passes without effect, see settle_buckets
        assert found["exchanges"] == [before + 1, before + 2, before + 3, before + 4]
    both = [found["weight"] for found in ranks["accumulation"]]
    assert torch.equal(*both)
    model = Regression()
    data = batches(8)
    windows = [(data * 3)[at : at + 6] for at in range(0, 24, 6)]
    joined = [
        tuple(torch.cat(tensors) for tensors in zip(*window, strict=True)) for window in windows
    ]
    SimpleTrainer(model, joined, sgd(model)).train(0, 4)
    torch.testing.assert_close(both[0], model.linear.weight.detach(), atol=1e-6, rtol=0)


def test_sharded_gradients_are_clipped_as_whole_ones(ranks):
    for found in ranks["sharded"]:
        assert max(found.values()) < 1e-6
