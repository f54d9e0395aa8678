"""The proof by killing: a short one, its control, and that the comparison sees what it has to see."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import start_forked
from tools import chaos, chaos_job
from trainkit.utils.logger import close_logger

ROOT = Path(__file__).resolve().parents[2]


def arguments(output_dir, *options):
    return chaos.parse_args([*options, "--output-dir", str(output_dir)])


class Forked:
    """Stands for ``subprocess.Popen``: a process that has imported torch and is forked from this one."""

    def __init__(self, command, env, start_new_session, stdout, stderr):
        def call():
            os.setsid()
            sys.argv = command[1:]
            sys.exit(chaos_job.main())

        self._process = start_forked(call, ROOT, env, stdout.name, stdout.name)
        self.pid = self._process.pid

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("chaos_job", timeout)
        return self._process.exitcode


@pytest.fixture
def forked(monkeypatch):
    """Starts of the job take no time for imports."""
    names = {"Popen": Forked, "STDOUT": subprocess.STDOUT, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(chaos, "subprocess", argparse.Namespace(**names))


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--kills 3 --seed 5", "--kills 2 --seed 1 --logical-ranks 4"])
def test_a_killed_run_ends_as_one_that_was_left_alone(forked, tmp_path, capsys, options):
    code = chaos.main(arguments(tmp_path / "runs", *options.split()))

    printed = capsys.readouterr().out
    assert (printed.splitlines()[-1], code) == ("identical", 0), printed
    if "logical" in options:  # with other numbers of processes
        assert [line for line in printed.splitlines() if "model_00" in line and "rank" in line]
    else:
        assert "3 kills (0 more were planned and missed): " in printed
        assert "; 2 follow a resume from a checkpoint, 0 were of one rank only" in printed


@pytest.mark.slow
def test_each_part_of_a_checkpoint_is_missed_if_it_is_left_out(tmp_path):
    job = chaos.Job(arguments(tmp_path, "--config-seed", "-1"))  # SEED is drawn at random
    assert job.start(tmp_path / "reference").code == 0  # by a new interpreter, as the tool starts it
    for number, kill in enumerate(chaos.CONTROL_KILLS):
        assert job.start(tmp_path / f"killed_{number}", kill).is_hit

    def resume(copy, part):
        # without workers, since that is quicker, and the same
        args = argparse.Namespace(output_dir=copy, seed=0, config_seed=-1, workers=0, resume=True, logical_ranks=0)
        chaos_job.train(args, {"without": part})
        close_logger()

    control = chaos.leave_out_and_compare(tmp_path, resume)
    assert {part for part, found in control.items() if not found} == {"", *chaos.NOT_MISSED}  # "": nothing is left out
    assert {"model", "trainer/rng", "trainer/data", "trainer/storage", "trainer/position"} <= control.keys()
    assert {"trainer/hooks/EMAHook", "trainer/_trainer/optimizer"} <= control.keys()


def plan(seed):
    """20 kills of a run of 90 iterations that gets to the last checkpoint before each."""
    planner = chaos.Planner(arguments("unused", "--kills", "20", "--seed", str(seed)), 90)
    begin, planned = 0, []
    while planner.num_left:
        planned.append((begin, planner.next(begin)))
        begin = max(begin, planned[-1][1].iter // 7 * 7)
        planner.num_left -= 1
    return planned


def test_twenty_kills_are_of_every_kind_and_four_in_five_follow_a_resume():
    for seed in range(4):
        planned = plan(seed)
        assert planned == plan(seed) != plan(seed + 1)
        places = {chaos.POINTS.get(kill.point, "the end") for _, kill in planned}
        assert {"a step", "a worker's fetch", "an evaluation", "a checkpoint write"} <= places
        assert sum(begin > 0 for begin, _ in planned) >= 16
        assert all(kill.iter > begin or kill.point == "before_train" for begin, kill in planned if begin < 88)
