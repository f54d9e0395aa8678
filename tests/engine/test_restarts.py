"""Runs of several processes by torchrun: on two nodes, restarted, resumed with another number of ranks."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine import restarted_job
from tests.engine.job import tiny_cfg
from tests.exactness.machine import content
from tests.forked import run_forked
from trainkit.engine import DefaultTrainer, EvaluationRun, default_argument_parser, launch

ROOT = Path(__file__).resolve().parents[2]
JOB = "tests/engine/restarted_job.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")
ONE_NODE = (*TORCHRUN, "2", "--standalone")


def command(launcher, folder, *options, **hooks):
    """``launcher`` and the job; ``hooks`` gives a hook's arguments by its name."""
    entries = [
        {"NAME": name, **{key.upper(): value for key, value in hooks[name].items()}}
        for name in hooks
    ]
    return [*launcher, JOB, "OUTPUT_DIR", str(folder), *options, "HOOKS", str(entries)]


def run(*commands, timeout_sec=300):
    """Of all of them together: the exit codes, and what was printed."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, cwd=ROOT, env=environ, **pipes) for command in commands]
    try:
        outputs = [process.communicate(timeout=timeout_sec)[0] for process in processes]
    finally:
        for process in processes:
            process.terminate()  # torchrun ends its own then
            process.communicate()
    return [process.returncode for process in processes], "".join(outputs)


def run_two(folder, *options, **hooks):
    """Of two forked ranks of the job: the exit code, and what was printed."""
    arguments = default_argument_parser().parse_args(command((), folder, *options, **hooks)[1:])
    done = run_forked(lambda: launch(restarted_job.main, 1, args=(arguments,)), ROOT, num_ranks=2)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run of two processes leaves that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    code, output = run_two(folder)
    assert code == 0, output
    return content(folder)


def begins(folder):
    """The iterations with which the starts have started, as their logs say."""
    logs = [folder / "previous_1/log.txt", folder / "log.txt"]
    text = "".join(log.read_text() for log in logs if log.exists())
    return [int(begin) for begin in re.findall(r"Training starts after (\d+) of 10", text)]


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_is_started_again_and_ends_as_one_left_alone(tmp_path, whole):
    launcher = (*ONE_NODE, "--max-restarts", "1")
    codes, output = run(command(launcher, tmp_path, KillFirstStart={"iter": 7}))
    assert codes == [0], output
    assert begins(tmp_path) == [0, 5]
    log = (tmp_path / "log.txt").read_text()
    assert log.count("The run was restarted; it resumes from its last checkpoint") == 1
    assert not (tmp_path / "previous_1").exists()
    assert content(tmp_path) == whole


@pytest.mark.slow
def test_two_nodes_are_one_run_which_starts_anew_without_a_checkpoint(tmp_path, whole, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = (
        "--nnodes",
        "2",
        "--max-restarts",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
    )
    nodes = [(*TORCHRUN, "1", *address, "--node-rank", str(node)) for node in range(2)]
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    codes, output = run(*(command(node, tmp_path, KillFirstStart={"iter": 2}) for node in nodes))
    assert codes == [0, 0], output
    assert begins(tmp_path) == [0, 0]
    assert not (tmp_path / "previous_2").exists()
    assert content(tmp_path) == whole


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_two_with_one_line_about_it(tmp_path):
    # without the hook, an evaluation warns of batch norm
    DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", [{"NAME": "SyncBuffers"}])).train(max_iter=6)
    code, output = run_two(tmp_path, "--resume", SyncBuffers={})
    assert code == 0, output
    assert "Training starts after 6 of 10" in output
    assert "WARNING" not in output
    assert len([line for line in output.splitlines() if "now there are 2" in line]) == 1


def test_a_run_that_is_started_again_goes_on_without_being_told_and_its_evaluation_does_not(
    tmp_path, monkeypatch
):
    cfg = tiny_cfg(tmp_path)
    DefaultTrainer(cfg).train(max_iter=6)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=False)
    assert trainer.start_iter == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=False)
    assert trainer.start_iter == 6
    torch.save({"model": trainer.model.state_dict()}, tmp_path / "weights.pth")
    evaluation = EvaluationRun(
        tiny_cfg(tmp_path, "MODEL.WEIGHTS", str(tmp_path / "weights.pth")), DefaultTrainer
    )
    evaluation.run()
    assert evaluation.iter == 0
