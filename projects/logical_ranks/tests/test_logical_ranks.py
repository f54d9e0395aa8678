"""Batches and a step of logical ranks in one process: test_same_bits_on_any_processes.py has several."""

import pytest
import torch
from torch import nn
from torch.utils.data import ChainDataset
from trainkit.projects.logical_ranks.loader import divide, own_ranks
from trainkit.projects.logical_ranks.trainer import LogicalTrainer

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Regression, batches, scalars, sgd
from trainkit.config import ConfigError, check_values
from trainkit.data.build import build_test_loader, build_train_loader, trivial_batch_collator
from trainkit.data.common import MapDataset
from trainkit.data.protocol import batches_per_epoch
from trainkit.utils import comm


@pytest.fixture
def as_rank(as_rank):
    """The process is this rank, and has a part of four logical ranks."""
    return lambda rank, world_size: (as_rank(rank, world_size), comm.set_data_ranks(rank, 4))


def train_loader(steps=1, mapper=None):
    dataset = MapDataset([*range(10)], mapper) if mapper else [*range(10)]
    loader = build_train_loader(
        dataset, total_batch_size=8, seed=3, collate_fn=trivial_batch_collator
    )
    return divide(loader, 4, steps)


def batches_by_rank(as_rank, world_size, num, steps, **options):
    """logical rank -> its batches in ``num`` iterations, of all processes."""
    found = {}
    for rank in range(world_size):
        as_rank(rank, world_size)
        batches = iter(train_loader(steps, **options))
        for logical_rank in own_ranks(4) * num:
            found.setdefault(logical_rank, []).extend(next(batches) for _ in range(steps))
    return found


def test_batches_and_what_is_drawn_for_them_do_not_depend_on_the_number_of_processes(as_rank):
    options = {"mapper": lambda sample: (sample, torch.rand(()).item())}
    alone = batches_by_rank(as_rank, 1, 4, 1, **options)
    assert [len(batch) for batch in alone[0]] == [2] * 4
    assert (
        alone
        == batches_by_rank(as_rank, 2, 4, 1, **options)
        == batches_by_rank(as_rank, 4, 2, 2, **options)
    )


def test_the_place_in_the_data_and_the_length_of_an_epoch_do_not_depend_on_the_number_of_processes(
    as_rank,
):
    states = []
    for world_size in (1, 2, 4):
        as_rank(0, world_size)
        loader = train_loader()
        batches, per_iter = iter(loader), 4 // world_size
        for _ in range(3 * per_iter):
            next(batches)
        states.append(loader.state_dict())
        following = next(batches)
        loader.load_state_dict(states[0])
        assert next(iter(loader)) == following
        assert batches_per_epoch(loader) / per_iter == 1.25
    assert states[0] == states[1] == states[2]
    assert states[0]["position"] == 24


def test_batches_to_evaluate_do_not_depend_on_the_number_of_processes(as_rank):
    def found(world_size, most=0):
        batches = []
        for rank in range(world_size):
            as_rank(rank, world_size)
            loader = divide(
                build_test_loader([*range(11)], batch_size=2, collate_fn=trivial_batch_collator), 4
            )
            loader = loader.first_batches(most) if most else loader
            batches += [*loader]
            assert len(loader) == len([*loader])
        return batches

    state = torch.get_rng_state()
    whole = [[0, 1], [2], [3, 4], [5], [6, 7], [8], [9, 10]]
    assert found(1) == found(2) == found(4) == whole
    assert (
        found(1, most=1)
        == found(2, most=1)
        == found(4, most=1)
        == [[0, 1], [3, 4], [6, 7], [9, 10]]
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_divided_is_refused(as_rank):
    as_rank(0, 1)
    with pytest.raises(ConfigError, match="positive multiple of the world size 4, got 6"):
        build_train_loader([0], total_batch_size=6, seed=0)
    with pytest.raises(
        ConfigError, match="SOLVER.LOGICAL_RANKS: got .* accepted: a map-style dataset"
    ):
        divide(build_train_loader(ChainDataset([]), total_batch_size=8, seed=0), 4)


class Parts(list):
    """Batches of logical ranks, as they come in one process."""

    logical_ranks, seed = 4, 0


ORDER = [0, 2, 1, 3]  # in which the process computes them


def parts(count, size=2):
    return Parts(batches(4 * count, size))


def trainer(model, data=None, **options):
    comm.set_data_ranks(0, 4)
    return LogicalTrainer(model, parts(3) if data is None else data, sgd(model), **options)


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_and_losses_are_added_in_a_tree_over_logical_ranks_after_the_micro_batches_of_each(
    steps,
):
    model, data, each = Regression(), parts(steps), []
    made = trainer(model, data, accumulation_steps=steps)
    made.optimizer.param_groups[0]["lr"] = 0.0
    made.train(7, 8)

    for batch in data:  # [logical rank in their order of computation, micro-batch]
        of_one = Regression()
        loss = of_one(batch)
        (loss / len(data)).backward()
        each.append(
            [loss.double().detach() / steps, *(parameter.grad for parameter in of_one.parameters())]
        )
    for place, name in enumerate(["total_loss", *model.parameters()]):
        values = [sum(each[steps * i + step][place] for step in range(steps)) for i in range(4)]
        by_rank = dict(zip(ORDER, values, strict=True))
        tree = (by_rank[0] + by_rank[2]) + (by_rank[1] + by_rank[3])
        if place:
            assert torch.equal(name.grad, tree)
        elif steps == 1:
            assert scalars(made)[name] == [((tree / 4).item(), 7)]


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, batch):
        return (self.weight * self.norm(batch[0])).square().mean()


def test_running_statistics_are_the_mean_of_those_of_the_logical_ranks_each_from_the_state_before_the_step():
    model, data = Norm(), parts(2)
    made = trainer(model, data)
    made.train(0, 1)
    for name in ("running_mean", "running_var"):
        each = []
        for batch in data[:4]:
            norm = nn.BatchNorm1d(3)
            norm(batch[0])
            each.append(getattr(norm, name).double() / 4)
        mean = (each[0] + each[1]) + (each[2] + each[3])  # in double precision, rounded once
        assert torch.equal(getattr(model.norm, name), mean.float())
    assert model.norm.num_batches_tracked == 1


class Queue(Regression):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(3))

    def forward(self, batch):
        self.queue[0] += 1
        return super().forward(batch)


def test_a_model_that_writes_other_buffers_or_cannot_be_added_in_a_tree_is_refused():
    with pytest.raises(ValueError, match="only the statistics of normalization layers"):
        trainer(Queue()).train(0, 1)
    for module in (nn.SyncBatchNorm(3), nn.Embedding(3, 3, sparse=True)):
        with pytest.raises(
            ConfigError, match="excludes SyncBatchNorm and sparse gradients, as in 1"
        ):
            trainer(nn.Sequential(nn.Linear(3, 3), module))


KEYS = "SOLVER.GRAPH.ENABLED MODEL.DDP.BROADCAST_BUFFERS TEST.PRECISE_BN.ENABLED SOLVER.ACCUMULATION_FACTORS"


@pytest.mark.parametrize("key", KEYS.split())
def test_settings_whose_sums_depend_on_the_number_of_processes_are_refused(key, tmp_path):
    with pytest.raises(ConfigError, match=f"SOLVER.LOGICAL_RANKS and {key}.* exclude each other"):
        check_values(
            tiny_cfg(
                tmp_path, "SOLVER.LOGICAL_RANKS", 4, key, [[2, 3]] if "FACTORS" in key else True
            )
        )


@pytest.mark.parametrize(("number", "world_size"), [(6, 1), (4, 8)])
def test_a_number_that_no_tree_has_or_that_processes_cannot_share_is_refused(
    number, world_size, tmp_path, monkeypatch
):
    monkeypatch.setattr("trainkit.utils.comm.get_world_size", lambda: world_size)
    with pytest.raises(
        ConfigError, match=f"LOGICAL_RANKS: got {number} .* a multiple of {world_size}"
    ):
        check_values(tiny_cfg(tmp_path, "SOLVER.LOGICAL_RANKS", number))


def test_an_error_in_a_property_of_the_loader_is_shown_and_not_hidden(monkeypatch):
    loader = train_loader()

    def fail(given):
        raise AttributeError("the dataset has no table")

    monkeypatch.setattr("trainkit.projects.logical_ranks.loader.batches_per_epoch", fail)
    with pytest.raises(AttributeError, match="the dataset has no table"):
        _ = loader.batches_per_epoch
    with pytest.raises(AttributeError, match="'LogicalLoader' object has no attribute 'batches'"):
        _ = loader.batches
