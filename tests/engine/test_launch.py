"""Processes, and one model on many of them."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.engine import create_ddp_model, launch
from trainkit.engine.launch import _TORCHRUN
from trainkit.utils import comm


def _work(path):
    """In two processes: who am I, and do two ranks train as one."""
    assert comm.get_world_size() == 2
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    ddp = create_ddp_model(model, broadcast_buffers=False)
    assert isinstance(ddp, DistributedDataParallel)
    data = torch.arange(6.0).reshape(2, 3)
    ddp(data[comm.get_rank()][None]).sum().backward()
    expected = data.mean(0)
    torch.testing.assert_close(model.weight.grad[0], expected)
    ranks = comm.all_gather((comm.get_rank(), comm.get_local_rank(), comm.get_local_size()))
    if comm.is_main_process():
        with open(path, "w") as file:
            file.write("done")
    return ranks


def _fail_on_rank_1():
    if comm.get_rank() == 1:
        raise RuntimeError("rank 1 has a problem")
    comm.synchronize()


def _exit(code):
    sys.exit(code)


def _identity(value):
    return value


def test_two_processes_are_one_run_whose_result_comes_back(tmp_path):
    ranks = launch(_work, 2, args=(tmp_path / "done",))
    assert ranks == [(0, 0, 2), (1, 1, 2)]
    assert (tmp_path / "done").read_text() == "done"
    assert not dist.is_initialized()


def test_a_failing_rank_ends_the_run_with_its_number_and_its_error():
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match=r"Process 1[\s\S]*rank 1 has a problem"):
        launch(_fail_on_rank_1, 2)


def test_a_process_that_exits_ends_the_run_with_its_code():
    with pytest.raises(SystemExit) as caught:
        launch(_exit, 2, args=(2,))
    assert caught.value.code == 2


def test_one_process_is_a_plain_call_without_a_process_group():
    assert launch(_identity, 1, args=("x",)) == "x"
    assert not dist.is_initialized()


def test_under_torchrun_its_process_is_one_of_the_run(monkeypatch):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name in _TORCHRUN:
        monkeypatch.setenv(name, str(values[name]))
    assert launch(lambda: (dist.is_initialized(), dist.get_backend(), os.environ["RANK"]), 1) == (True, "gloo", "0")
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "need num_gpus_per_machine >= 1"),
        ((1, 0), "need num_gpus_per_machine >= 1, num_machines >= 1"),
        ((1, 2, 2), "0 <= machine_rank < num_machines, got 1, 2 and 2"),
        ((1, 2, 0), "several machines need a dist_url"),
    ],
)
def test_counts_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        launch(_identity, *arguments)


def test_one_process_keeps_the_model_as_it_is():
    model = nn.Linear(1, 1)
    assert create_ddp_model(model) is model
