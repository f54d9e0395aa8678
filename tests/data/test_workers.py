import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.data import TrainingSampler, build_batch_data_loader

ROOT = Path(__file__).parents[2]


class Job:
    """`signalled_job`, in a process group of its own."""

    def __init__(self, kind):
        command = [sys.executable, "-m", "tests.data.signalled_job", kind]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(
            command, cwd=ROOT, **pipes, text=True, start_new_session=True
        )

    def ask(self, command):
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fork", "plain", "forkserver", "spawn"])
def test_workers_go_on_when_the_whole_process_group_is_signalled_and_end_with_their_loader(
    kind, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "42")  # there a run takes SIGUSR1 too
    with contextlib.closing(Job(kind)) as job:
        # one of each worker: both have started
        assert [job.ask("batch"), job.ask("batch")] == [
            "0",
            "1",
        ]
        pids = job.ask("pids")

        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGUSR1,
            signal.SIGTERM,
        ):
            os.killpg(job.process.pid, number)

        assert [job.ask("batch") for _ in range(4)] == ["2", "3", "4", "5"]
        assert job.ask("pids") == pids
        assert job.ask("drop") == "dropped"
        assert job.ask("pids") == ""
        _, errors = job.process.communicate(timeout=60)
        assert job.process.returncode == 0
        assert errors == ""


GARBAGE = """
import gc, sys
import torch, torch.distributed as dist
from trainkit.data import ResumableLoader, TrainingSampler

class Collecting(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        gc.collect()
        return index, gc.isenabled()

gc.disable()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
group = dist.group.WORLD
cycle = [group]
cycle.append(cycle)
dist.destroy_process_group()
del cycle, group  # garbage from now on

sampler = TrainingSampler(4, shuffle=False)
loader = ResumableLoader(Collecting(), sampler=sampler, batch_size=4, num_workers=1)
[indices, enabled] = next(iter(loader))
print(indices.tolist(), enabled.tolist(), gc.isenabled())
"""


def test_a_forked_worker_does_not_destroy_what_its_parent_has_thrown_away(tmp_path):
    command = [sys.executable, "-c", GARBAGE, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # the worker collects its own garbage, and its parent still does not
    assert done.stdout == "[0, 1, 2, 3] [True, True, True, True] False\n"


def test_starting_workers_leaves_the_signals_of_their_parent_as_they_are():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    of_sigterm = signal.getsignal(signal.SIGTERM)
    of_sigint = signal.getsignal(signal.SIGINT)
    batch = next(iter(build_batch_data_loader([5], TrainingSampler(1, seed=0), 1, num_workers=1)))
    assert batch == [5]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert signal.getsignal(signal.SIGTERM) == of_sigterm
    assert signal.getsignal(signal.SIGINT) == of_sigint


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize("kind", ["fork", "forkserver"])
def test_workers_end_by_the_sigterm_of_their_parent_in_an_endless_fetch_too_and_do_not_outlive_it(
    kind,
):
    for command, num_batches in (("terminate", 7), ("batch", 1))[kind == "forkserver" :]:
        with contextlib.closing(Job(kind)) as job:
            for _ in range(num_batches):
                job.ask("batch")
            ends = [os.pidfd_open(int(pid)) for pid in job.ask("pids").split()]
            if command == "terminate":
                assert job.ask("terminate") == "0 0"
            job.process.kill()
            for end in ends:
                assert select.select([end], [], [], 60)[0], "a worker is still there"
                os.close(end)
