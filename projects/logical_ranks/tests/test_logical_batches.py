"""Logical ranks get the same batches on any number of processes."""

import pytest
import torch
from torch.utils.data import ChainDataset
from trainkit.projects.logical_ranks.loader import divide
from trainkit.projects.logical_ranks.ranks import own_ranks

from trainkit.config import ConfigError
from trainkit.data.build import build_test_loader, build_train_loader, trivial_batch_collator
from trainkit.data.common import MapDataset
from trainkit.utils import comm
from trainkit.utils.periods import exact
from trainkit.utils.protocol import iters_per_epoch


@pytest.fixture
def as_rank(monkeypatch):
    """The process is this rank, and has a part of four logical ranks."""

    def set_ranks(rank, world_size):
        monkeypatch.setattr(comm, "get_rank", lambda: rank)
        monkeypatch.setattr(comm, "get_world_size", lambda: world_size)
        comm.set_data_ranks(rank, 4)

    yield set_ranks
    comm.set_data_ranks()


def train_loader(steps=1, mapper=None):
    dataset = MapDataset([*range(10)], mapper) if mapper else [*range(10)]
    loader = build_train_loader(dataset, total_batch_size=8, seed=3, collate_fn=trivial_batch_collator)
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
    assert alone == batches_by_rank(as_rank, 2, 4, 1, **options) == batches_by_rank(as_rank, 4, 2, 2, **options)


def test_the_place_in_the_data_and_the_length_of_an_epoch_do_not_depend_on_the_number_of_processes(as_rank):
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
        assert exact(iters_per_epoch(loader)) / per_iter == 1.25
    assert states[0] == states[1] == states[2]
    assert states[0]["position"] == 24


def test_batches_to_evaluate_do_not_depend_on_the_number_of_processes(as_rank):
    def found(world_size, most=0):
        batches = []
        for rank in range(world_size):
            as_rank(rank, world_size)
            loader = divide(build_test_loader([*range(11)], batch_size=2, collate_fn=trivial_batch_collator), 4)
            loader = loader.first_batches(most) if most else loader
            batches += [*loader]
            assert len(loader) == len([*loader])
        return batches

    state = torch.get_rng_state()
    whole = [[0, 1], [2], [3, 4], [5], [6, 7], [8], [9, 10]]
    assert found(1) == found(2) == found(4) == whole
    assert found(1, most=1) == found(2, most=1) == found(4, most=1) == [[0, 1], [3, 4], [6, 7], [9, 10]]
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_divided_is_refused(as_rank):
    as_rank(0, 1)
    with pytest.raises(ConfigError, match="positive multiple of the world size 4, got 6"):
        build_train_loader([0], total_batch_size=6, seed=0)
    with pytest.raises(ConfigError, match="SOLVER.LOGICAL_RANKS: got .* accepted: a map-style dataset"):
        divide(build_train_loader(ChainDataset([]), total_batch_size=8, seed=0), 4)
