"""The processes that launch starts, and the process group of each."""

import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from trainkit.config import ConfigError
from trainkit.engine import is_restarted, launch, user_errors_exit
from trainkit.engine.launch import run_rank
from trainkit.engine.stopping import StopRequests
from trainkit.utils import comm


def _work(folder):
    assert comm.get_world_size() == 2
    assert comm.get_local_size() == 2
    (folder / f"rank{comm.get_rank()}").write_text(
        f"{comm.all_gather(comm.get_rank())} {comm.get_local_rank()} "
        f"{multiprocessing.get_start_method()}"
    )


def _fail_on_rank_1():
    if comm.get_rank() == 1:
        raise RuntimeError("rank 1 has a problem")
    comm.synchronize()


def _make_a_mistake(ranks):
    with user_errors_exit():
        if comm.get_rank() in ranks:
            raise ConfigError("MAX_ITER is wrong; correct it")
        comm.synchronize()


def _stop_by(signum, to_launcher, folder):
    """Steps until a signal that rank 1 sends, to the launcher or to itself, stops the run; rank 0 then still writes."""
    stops, iter = StopRequests(), 0
    stops.reset(2)
    with stops.listening():
        while (stop := stops.agreed(iter)) is None:
            if iter == 5 and comm.get_rank() == 1:
                os.kill(os.getppid() if to_launcher else os.getpid(), signum)
            iter += 1
    if comm.get_rank() == 0:
        time.sleep(0.5)  # rank 1 has ended
    (folder / f"rank{comm.get_rank()}").write_text(f"{iter} {stop.reason}")
    if stop.signum == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + stop.signum)


def _hear_sigterm(folder):
    """On all ranks when this returns: a function that waits for the signal. The file has the number of this process."""
    reads, writes = os.pipe()
    signal.signal(signal.SIGTERM, lambda signum, frame: os.write(writes, b"!"))
    (folder / f"pid{comm.get_rank()}").write_text(str(os.getpid()))
    comm.synchronize()
    return lambda: os.read(reads, 1)


def _finish_all_the_same(folder):
    wait_for_sigterm = _hear_sigterm(folder)
    if comm.get_rank() == 1:
        os.kill(os.getppid(), signal.SIGTERM)
    wait_for_sigterm()


def _be_killed_on_rank_1(folder):
    _hear_sigterm(folder)
    if comm.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.synchronize()


@pytest.fixture
def interruptible():
    """A process in the background ignores SIGINT; those that it starts do so too."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path):
    assert launch(_work, 2, args=(tmp_path,)) is None
    # workers of a loader start as in one process: a spawned one would import torch again
    method = multiprocessing.get_start_method()
    of_ranks = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert of_ranks == [f"[0, 1] 0 {method}", f"[0, 1] 1 {method}"]
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_rank_that_fails_or_is_killed_ends_the_run_with_its_number_and_its_error(
    forked_ranks, tmp_path
):
    with pytest.raises(
        torch.multiprocessing.ProcessRaisedException, match=r"Process 1[\s\S]*rank 1 has a problem"
    ):
        launch(_fail_on_rank_1, 2)
    with pytest.raises(
        torch.multiprocessing.ProcessExitedException,
        match="process 1 terminated with signal SIGKILL",
    ):
        launch(_be_killed_on_rank_1, 2, args=(tmp_path,))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid0").read_text()), 0)


@pytest.mark.slow
def test_a_mistake_is_told_once_whichever_rank_finds_it(forked_ranks, capfd):
    for ranks in ((0, 1), (1,)):
        with pytest.raises(SystemExit, match="^2$"):
            launch(_make_a_mistake, 2, args=(ranks,))
        assert capfd.readouterr().err.count("MAX_ITER is wrong") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "to_launcher", "reason", "code"),
    [
        (signal.SIGTERM, True, "SIGTERM", 143),
        # Ctrl-C reaches the ranks too, and a second one would not be a request
        (
            signal.SIGINT,
            True,
            "SIGTERM",
            130,
        ),
        (signal.SIGINT, False, "SIGINT", 130),
        (signal.SIGUSR1, True, "SIGUSR1", 138),
    ],
)
def test_a_signal_stops_all_ranks_after_the_same_step(
    forked_ranks, tmp_path, monkeypatch, interruptible, signum, to_launcher, reason, code
):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    with pytest.raises(SystemExit) as caught:
        launch(_stop_by, 2, args=(signum, to_launcher, tmp_path))
    assert caught.value.code == code
    iters, reasons = zip(
        *((tmp_path / f"rank{rank}").read_text().split() for rank in range(2)), strict=True
    )
    assert iters[0] == iters[1]
    assert reasons == (reason, reason)


@pytest.mark.slow
def test_a_run_that_finishes_in_spite_of_a_signal_has_finished(forked_ranks, tmp_path):
    assert launch(_finish_all_the_same, 2, args=(tmp_path,)) is None


@pytest.fixture
def be_rank(monkeypatch):
    """Have the variables of torchrun, which keeps one store for all starts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def be(**values):
        values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, **values}
        values |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return be


def test_under_torchrun_its_process_is_one_of_the_run_and_each_start_has_names_of_its_own(be_rank):
    def work():
        return (
            dist.is_initialized(),
            dist.get_backend(),
            is_restarted(),
            dist.distributed_c10d._get_default_store(),
        )

    be_rank(TORCHELASTIC_RESTART_COUNT=0)
    *first, store = launch(work, 1)
    store.set("address", "of the first start")
    be_rank(TORCHELASTIC_RESTART_COUNT=1)
    *second, store = launch(work, 1)
    assert first == [True, "gloo", False]
    assert second == [True, "gloo", True]
    assert not store.check(["address"])
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("kind", "num_devices", "environ", "device", "backend"),
    [
        ("xpu", 4, {}, "xpu:1", "cpu:gloo,xpu:xccl"),
        ("cuda", 1, {}, None, "gloo"),  # for a model on the CPU of a machine with one GPU
        # the one that SLURM shows this task
        (
            "cuda",
            1,
            {"SLURM_PROCID": 1},
            "cuda:0",
            "cpu:gloo,cuda:nccl",
        ),
        ("mps", 2, {}, None, "gloo"),
    ],
)
def test_each_process_takes_its_own_device_and_tensors_of_the_cpu_go_over_gloo(
    kind, num_devices, environ, device, backend, be_rank, monkeypatch
):
    be_rank(LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, **environ)
    found, init_process_group = {}, dist.init_process_group

    def init(backend, **kwargs):
        found.update(kwargs, backend=backend)
        init_process_group("gloo", **{**kwargs, "device_id": None})

    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind)
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: found.update(index=index)
    )
    monkeypatch.setattr(dist, "init_process_group", init)
    run_rank(str, (1,), timedelta(seconds=9))

    assert found["backend"] == backend
    assert str(found["device_id"]) == str(device)
    assert found.get("index") == (None if device is None else int(device[-1]))


def test_one_process_is_a_plain_call_without_a_process_group():
    assert launch(str, 1, args=("x",)) == "x"
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "got -1, 0 and 1"),
        ((1, 2, 2), "got 1, 2 and 2"),
        ((1, 2, 0), "dist_url: got None; accepted: tcp://HOST:PORT"),
        ((2, 1, 0, "tcp://host"), "dist_url: got 'tcp://host'"),
    ],
)
def test_numbers_of_ranks_without_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        launch(str, *arguments)
