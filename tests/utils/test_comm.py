"""comm: with no process group, with a group of one, and with two processes and two groups in turn."""

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.two_ranks import on_two_ranks
from trainkit.utils import comm


def test_without_a_process_group_there_is_one_process():
    data = object()
    assert comm.get_world_size() == 1
    assert comm.get_rank() == 0
    assert comm.is_main_process()
    assert comm.get_local_size() == 1
    assert comm.get_local_rank() == 0
    assert comm.all_gather(data) == [data]
    assert comm.gather(data) == [data]
    assert comm.broadcast(data) == data
    comm.synchronize()
    values = {"b": torch.tensor(1.0), "a": torch.tensor(2.0)}
    assert list(comm.reduce_dict(values).items()) == [("a", values["a"]), ("b", values["b"])]


def test_the_shared_seed_follows_numpys_seed_and_moves_on():
    np.random.seed(3)
    seeds = [comm.shared_random_seed(), comm.shared_random_seed()]
    assert seeds[0] != seeds[1]
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds)
    np.random.seed(3)
    assert seeds == [comm.shared_random_seed(), comm.shared_random_seed()]


def test_a_local_group_ends_with_its_process_group_and_without_one_torchrun_says_the_rank(
    monkeypatch,
):
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            monkeypatch.setenv("LOCAL_RANK", "3")
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
            assert comm.get_local_rank() == 3
            assert comm.get_local_size() == 4
            comm.create_local_process_group(1)
            assert comm.get_local_rank() == 0
            assert comm.get_local_size() == 1
            assert dist.get_world_size(comm.get_local_process_group()) == 1
        finally:
            dist.destroy_process_group()


def in_three_groups(rank, folder):
    """Backend "other" stands for one that is not Gloo, so that comm makes a Gloo group of its own."""
    dist.Backend.register_backend(
        "other",
        lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
        devices=["cpu"],
    )
    dist.destroy_process_group()  # that of `on_two_ranks`
    for index, backend in enumerate(("other", "other", "gloo")):
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store{index}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=60),
        )
        _check_two_ranks(rank)
        if index < 2:
            dist.destroy_process_group()


def _check_two_ranks(rank):
    assert comm.get_world_size() == 2
    assert comm.get_rank() == rank
    assert comm.is_main_process() == (rank == 0)
    assert comm.get_local_rank() == rank
    assert comm.get_local_size() == 2
    assert comm.all_gather({"rank": rank, "pad": "x" * rank}) == [
        {"rank": 0, "pad": ""},
        {"rank": 1, "pad": "x"},
    ]
    assert comm.gather(rank, dst=1) == ([0, 1] if rank == 1 else [])
    assert comm.broadcast(f"from {rank}", src=1) == "from 1"
    np.random.seed(rank)
    assert len(set(comm.all_gather(comm.shared_random_seed()))) == 1

    values = {"a": torch.tensor(2 * rank), "b": torch.tensor([1.0, rank])}
    mean = comm.reduce_dict(values if rank else dict(reversed(values.items())))
    assert {name: value.tolist() for name, value in mean.items()} == {"a": 1.0, "b": [1.0, 0.5]}
    total = comm.reduce_dict(values, average=False)
    assert {name: value.tolist() for name, value in total.items()} == {"a": 2, "b": [2.0, 1.0]}

    comm.create_local_process_group(1)
    assert comm.get_local_rank() == 0
    assert comm.get_local_size() == 1
    assert comm.all_gather(rank, group=comm.get_local_process_group()) == [rank]
    comm.synchronize()


@pytest.mark.slow
def test_two_processes_exchange_objects_in_each_of_three_groups(tmp_path):
    assert on_two_ranks([in_three_groups], tmp_path) == {"in_three_groups": [None, None]}
