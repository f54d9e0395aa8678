"""What one rank decides holds for all, also where another one would decide otherwise."""

import os

import pytest
import torch

from tests.engine.tiny import AfterStep, Weight, sgd
from tests.two_ranks import SLOW, on_two_ranks
from trainkit.checkpoint import Checkpointer
from trainkit.engine.hooks import BestCheckpointer, EarlyStopping, EvalHook, LRScheduler, ReduceOnPlateau
from trainkit.engine.step import SimpleTrainer
from trainkit.solver import LRFunction

BY_RANK = [  # rank 0 alone would stop after iteration 4, rank 1 never
    [5.0, 7.0, 6.0, 6.5, 6.0, 8.0, 9.0, 9.5],
    [1.0, 0.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
]


def run(values, folder, *hooks):
    """(iterations, status), the best checkpoints, and the learning rate of each iteration."""
    results, lrs, saved = iter(values), [], []

    class Saves(Checkpointer):
        def save(self, name, **kwargs):
            saved.append(kwargs["iteration"])
            return super().save(name, **kwargs)

    model = Weight()
    optimizer = sgd(model, 0.5)
    trainer = SimpleTrainer(model, [torch.ones(())], optimizer)
    trainer.stop_check_period = 4
    trainer.scheduler = LRFunction(optimizer, lambda t, base: base)
    trainer.register_hooks(
        [
            AfterStep(lambda trainer: lrs.append(optimizer.param_groups[0]["lr"])),
            LRScheduler(),
            EvalHook(1, lambda: {"top1": next(results)}, eval_after_train=False),
            ReduceOnPlateau(1, "top1", patience=0, factor=0.5),
            BestCheckpointer(1, Saves(model, os.path.join(folder, "checkpoints")), "top1"),
            EarlyStopping(1, "top1", patience=3),
            *hooks,
        ]
    )
    trainer.train(0, 8)
    return (trainer.iter, trainer.status), saved, lrs


def results_of_their_own(rank, folder):
    return run(BY_RANK[rank], folder)


def a_request_on_rank_1(rank, folder):
    ask = AfterStep(lambda trainer: trainer.iter == 1 and rank == 1 and trainer.request_stop("enough"))
    return run(BY_RANK[1], folder, ask)[0]


@pytest.fixture(scope="module", params=SLOW)
def ranks(tmp_path_factory):
    return on_two_ranks([results_of_their_own, a_request_on_rank_1], tmp_path_factory.mktemp("ranks"))


def test_all_ranks_stop_save_and_reduce_the_rate_as_rank_0_does(ranks, tmp_path):
    first = (5, "finished"), [0, 1], [0.5, 0.5, 0.5, 0.25, 0.125]
    assert run(BY_RANK[0], tmp_path / "first") == first
    assert ranks["results_of_their_own"] == [first, first]
    second = (8, "finished"), [0, 2, 3, 4, 5, 6, 7], [0.5, 0.5] + [0.25] * 6
    assert run(BY_RANK[1], tmp_path / "second") == second


def test_a_stop_that_one_rank_asks_for_ends_all_after_the_same_step(ranks):
    assert ranks["a_request_on_rank_1"] == [(5, "stopped")] * 2
