"""Logical ranks get the same batches on any number of processes."""

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from trainkit.config import ConfigError
from trainkit.data.build import build_test_loader, build_train_loader, first_batches, iters_per_epoch
from trainkit.data.common import MapDataset
from trainkit.data.samplers import InferenceSampler
from trainkit.utils.logical import own_ranks, tree_sum
from trainkit.utils.periods import exact


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_sums_over_the_ranks_of_a_process_and_then_over_processes_are_those_of_one_tree(world_size):
    values = np.random.default_rng(0).standard_normal((8, 50)).astype(np.float32)
    by_process = [tree_sum(values[sorted(own_ranks(8, rank, world_size))]) for rank in range(world_size)]
    assert (tree_sum(np.stack(by_process)) == tree_sum(values)).all()
    assert (values.sum(0) != tree_sum(values)).any()


def test_neighbours_among_the_ranks_of_a_process_have_the_same_parent():
    assert own_ranks(8, 0, 1) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert own_ranks(8, 1, 2) == [1, 5, 3, 7]
    assert own_ranks(8, 3, 8) == [3]


def batches_by_rank(as_rank, world_size, num, loader_of):
    """logical rank -> its first ``num`` batches, of all processes."""
    found = {}
    for rank in range(world_size):
        as_rank(rank, world_size)
        own, batches = own_ranks(4, rank, world_size), iter(loader_of())
        for _ in range(num):
            for logical_rank in own:
                found.setdefault(logical_rank, []).append(next(batches))
    return found


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_batches_and_what_is_drawn_for_them_do_not_depend_on_the_number_of_processes(as_rank, num_workers):
    def loader():
        mapped = MapDataset([*range(10)], lambda sample: (sample, torch.rand(()).item()))
        return build_train_loader(mapped, total_batch_size=8, seed=3, logical_ranks=4, num_workers=num_workers)

    alone = batches_by_rank(as_rank, 1, 5, loader)
    assert [len(batch) for batch in alone[0]] == [2] * 5
    assert alone == batches_by_rank(as_rank, 2, 5, loader) == batches_by_rank(as_rank, 4, 5, loader)


def test_the_place_in_the_data_and_the_length_of_an_epoch_do_not_depend_on_the_number_of_processes(as_rank):
    states = []
    for world_size in (1, 2, 4):
        as_rank(0, world_size)
        loader = build_train_loader([*range(10)], total_batch_size=8, seed=3, logical_ranks=4)
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
            loader = build_test_loader([*range(11)], batch_size=2, logical_ranks=4)
            loader = first_batches(loader, most) if most else loader
            batches += [*loader]
            assert len(loader) == len([*loader])
        return batches

    whole = [[0, 1], [2], [3, 4], [5], [6, 7], [8], [9, 10]]
    assert found(1) == found(2) == found(4) == whole
    assert found(1, most=1) == found(2, most=1) == found(4, most=1) == [[0, 1], [3, 4], [6, 7], [9, 10]]
    as_rank(1, 2)
    assert [*InferenceSampler(11, logical_ranks=4)] == [6, 7, 8, 9, 10]
    assert [*first_batches([1, 2, 3], 2)] == [1, 2]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(ConfigError, match="positive multiple of the number of logical ranks 4, got 6"):
        build_train_loader([0], total_batch_size=6, seed=0, logical_ranks=4)
    with pytest.raises(ConfigError, match=r"SOLVER.LOGICAL_RANKS.* got those of Stream; take a map-style dataset"):
        build_train_loader(Stream(), total_batch_size=8, seed=0, logical_ranks=4)
