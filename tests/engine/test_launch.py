"""Processes, and one model on many of them."""

import atexit
import json
import os
import signal
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.config import ConfigError
from trainkit.engine import create_ddp_model, launch, user_errors_exit
from trainkit.engine.launch import _TORCHRUN, _free_port, _process_group
from trainkit.engine.stopping import StopRequests
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


def _as_tensor(value):
    return torch.tensor(value)


def _stop_by(signum, to_launcher, folder):
    """Steps until a signal that rank 1 sends, to the launcher or to itself, stops the run."""
    stops, iter = StopRequests(2), 0
    stops.reset()
    with stops.listening():
        while (stop := stops.agreed(iter)) is None:
            if iter == 5 and comm.get_rank() == 1:
                os.kill(os.getppid() if to_launcher else os.getpid(), signum)
            iter += 1
    (folder / f"rank{comm.get_rank()}").write_text(f"{iter} {stop.reason}")
    if stop.signum == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(stop.exit_code)


def _hear_sigterm(folder):
    """On all ranks when this returns: wait for SIGTERM. Leaves the number of this process behind."""
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
    return "finished"


def _listen_to_nothing():
    if comm.get_rank() == 1:
        os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()


def _be_killed_on_rank_1(folder, while_stopping):
    wait_for_sigterm = _hear_sigterm(folder)
    if comm.get_rank() == 1:
        if while_stopping:
            os.kill(os.getppid(), signal.SIGTERM)
            wait_for_sigterm()
        os.kill(os.getpid(), signal.SIGKILL)
    comm.synchronize()


def _fail_on_rank_1_and_then_on_rank_0(folder):
    """Rank 1 fails first, and its process ends last."""
    wait_for_sigterm = _hear_sigterm(folder)
    if comm.get_rank() == 0:
        wait_for_sigterm()
        raise RuntimeError("rank 0 has lost rank 1")

    def wait_for_rank_0():
        os.kill(int((folder / "pid0").read_text()), signal.SIGTERM)
        while not has_ended(folder, 0):
            pass

    atexit.register(wait_for_rank_0)
    raise RuntimeError("rank 1 has a problem")


def _interrupt_the_launcher_twice(folder):
    """The second time when the first one has been passed on; nobody ends of himself."""
    wait_for_sigterm = _hear_sigterm(folder)
    if comm.get_rank() == 1:
        os.kill(os.getppid(), signal.SIGINT)
        wait_for_sigterm()
        os.kill(os.getppid(), signal.SIGINT)
    while True:
        signal.pause()


def _make_a_mistake(ranks):
    with user_errors_exit():
        if comm.get_rank() in ranks:
            raise ConfigError("MAX_ITER is wrong; correct it")
        comm.synchronize()


def _exit_with_2(ranks):
    sys.exit(2)


def _end_under_torchrun(end, folder):
    """It tells each process of its own where it reads the error."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"{comm.get_rank()}.json")
    end((0, 1))


def _identity(value):
    return value


@pytest.fixture
def interruptible():
    """A process in the background ignores SIGINT, and one under nohup SIGHUP; those that it starts do so too."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, former[0])
    signal.signal(signal.SIGHUP, former[1])


def has_ended(folder, rank):
    try:
        os.kill(int((folder / f"pid{rank}").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def test_two_processes_are_one_run_whose_result_comes_back(tmp_path):
    ranks = launch(_work, 2, args=(tmp_path / "done",))
    assert ranks == [(0, 0, 2), (1, 1, 2)]
    assert (tmp_path / "done").read_text() == "done"
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_tensor_comes_back_too_although_its_process_has_ended(forked_ranks):
    assert launch(_as_tensor, 2, args=([1.0, 2.0],)).tolist() == [1, 2]


@pytest.mark.slow
def test_a_failing_rank_ends_the_run_with_its_number_and_its_error(forked_ranks):
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match=r"Process 1[\s\S]*rank 1 has a problem"):
        launch(_fail_on_rank_1, 2)


@pytest.mark.slow
def test_of_several_failures_the_first_is_the_one_that_is_raised(tmp_path):
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match=r"Process 1[\s\S]*rank 1 has a problem"):
        launch(_fail_on_rank_1_and_then_on_rank_0, 2, args=(tmp_path,))


@pytest.mark.slow
def test_a_process_that_exits_ends_the_run_with_its_code(forked_ranks):
    with pytest.raises(SystemExit) as caught:
        launch(_exit, 2, args=(2,))
    assert caught.value.code == 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)])
def test_a_mistake_is_told_once_whichever_rank_finds_it(forked_ranks, capfd, ranks):
    with pytest.raises(SystemExit) as caught:
        launch(_make_a_mistake, 2, args=(ranks,))
    assert caught.value.code == 2
    assert capfd.readouterr().err.count("MAX_ITER is wrong") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "told"), [(_make_a_mistake, "ConfigError: MAX_ITER is wrong; correct it"), (_exit_with_2, None)]
)
def test_torchrun_gets_to_know_the_mistake_behind_an_exit(forked_ranks, tmp_path, end, told):
    with pytest.raises(SystemExit):
        launch(_end_under_torchrun, 2, args=(end, tmp_path))
    errors = [json.loads(file.read_text())["message"]["message"] for file in tmp_path.iterdir()]
    assert errors == ([told, told] if told else [])


@pytest.mark.slow
def test_processes_that_exit_without_an_error_have_no_result(forked_ranks):
    assert launch(_exit, 2, args=(0,)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "to_launcher", "reason", "code"),
    [
        (signal.SIGTERM, True, "SIGTERM", 143),
        (signal.SIGINT, True, "SIGTERM", 130),  # Ctrl-C reaches the ranks too, and a second one would not be a request
        (signal.SIGINT, False, "SIGINT", 130),
        (signal.SIGHUP, False, "SIGHUP", 129),
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
    iters, reasons = zip(*((tmp_path / f"rank{rank}").read_text().split() for rank in range(2)), strict=True)
    assert iters[0] == iters[1]
    assert reasons == (reason, reason)


@pytest.mark.slow
def test_a_run_that_finishes_in_spite_of_a_signal_has_its_result(forked_ranks, tmp_path):
    assert launch(_finish_all_the_same, 2, args=(tmp_path,)) == "finished"


@pytest.mark.slow
def test_ranks_that_do_not_listen_end_of_the_signal_and_the_launcher_has_its_code():
    with pytest.raises(SystemExit) as caught:
        launch(_listen_to_nothing, 2)
    assert caught.value.code == 143


@pytest.mark.slow
@pytest.mark.parametrize("while_stopping", [False, True])
def test_a_rank_that_is_killed_ends_the_run_with_its_number(forked_ranks, tmp_path, while_stopping):
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        launch(_be_killed_on_rank_1, 2, args=(tmp_path, while_stopping))
    assert has_ended(tmp_path, 0)


@pytest.mark.slow
def test_a_second_interrupt_kills_the_ranks(forked_ranks, tmp_path, interruptible):
    with pytest.raises(SystemExit) as caught:
        launch(_interrupt_the_launcher_twice, 2, args=(tmp_path,))
    assert caught.value.code == 130
    assert [has_ended(tmp_path, rank) for rank in range(2)] == [True, True]


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
    ("num_gpus", "num_local", "slurm", "device", "backend"),
    [
        (0, 2, False, None, "gloo"),
        (4, 2, False, torch.device("cuda", 1), "cpu:gloo,cuda:nccl"),
        (1, 2, False, None, "gloo"),  # for a model on the CPU of a machine with one GPU
        (1, 2, True, torch.device("cuda", 0), "cpu:gloo,cuda:nccl"),  # the one that SLURM shows this task
    ],
)
def test_each_process_takes_its_own_gpu_and_tensors_of_the_cpu_go_over_gloo(
    num_gpus, num_local, slurm, device, backend, monkeypatch
):
    for name, value in {
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": str(num_local),
        **({"SLURM_PROCID": "1"} if slurm else {}),
    }.items():
        monkeypatch.setenv(name, value)
    found = {}
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.update(set_device=device))
    init_process_group = dist.init_process_group

    def init(backend, **kwargs):
        found.update(kwargs, backend=backend)
        init_process_group("gloo", **{**kwargs, "device_id": None})

    monkeypatch.setattr(dist, "init_process_group", init)
    with _process_group(f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=1, timeout=timedelta(seconds=9)):
        pass

    assert (found["backend"], found["device_id"], found.get("set_device")) == (backend, device, device)


def test_a_rank_that_waits_for_the_others_says_where_and_for_how_many(monkeypatch, caplog):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(sys.modules[launch.__module__], "_PATIENCE_SEC", 0.1)  # the package shows the function
    url = f"tcp://127.0.0.1:{_free_port()}"
    with pytest.raises(dist.DistError), _process_group(url, rank=1, world_size=3, timeout=timedelta(seconds=1)):
        pass
    (waits,) = caplog.messages
    assert waits.startswith(f"Rank 1 waits at {url} for the other processes; 3 have to start")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "need at least 1 process per machine"),
        ((1, 0), "got 1, 0 and 0"),
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
