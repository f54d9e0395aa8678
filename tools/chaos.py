#!/usr/bin/env python
"""Kill a run again and again, resume it with the same command each time, and compare it with a run that is not killed.

::

    python tools/chaos.py --kills 20 --seed 0 --processes 2

trains the job of ``chaos_job.py``, prints a table of the kills, and ends with "identical" (exit code 0), or with
"different" and the first difference (1). ``--without PART`` is the control: a run that was killed once continues
without this part of its checkpoint (``all``: without each part in turn), and the comparison has to see it. It ends with
"seen" (0), or with "not seen" and the part (1). With ``--logical-ranks 4`` each start of the killed run has another
number of processes: 1, 2 or 4.
"""

import argparse
import ctypes
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from inspect_checkpoint import parts_of
from tabulate import tabulate
from torch import nn
from trainkit.projects.replay import checkpoints
from trainkit.projects.replay.checkpoints import CLOCK_READINGS, is_of_the_clock

from trainkit.checkpoint import Checkpointer
from trainkit.checkpoint.file import read_file
from trainkit.checkpoint.folder import RUN_ID

JOB = Path(__file__).with_name("chaos_job.py")
SURE_OF_CHECKPOINT = 14  # the save in this iteration waits for the first save

# These files describe the starts of a run, or hold files that a start moved aside. Clock readings, and lines of
# metrics.json that hold nothing else, are not compared either.
UNCOMPARED_FILES = (
    "log.txt*",
    "previous_*",
    "config.yaml",
    "metrics.json.*",
    "events.*",
    "capsule.*",
)

# point at which a run can be killed -> the activity to which it belongs
POINTS = {
    "forward": "a step",
    "fetch": "a worker's fetch",
    "evaluation": "an evaluation",
    "write": "a checkpoint write",
    "after_backward": "a step",
    "before rename": "a checkpoint write",
    "after_step, after the save": "a step",
    "after fsync": "a checkpoint write",
    "a step during a save": "a checkpoint write",
    "before_train": "the start",
    "after rename": "a checkpoint write",
    "after_step, first": "a step",
    "before fsync": "a checkpoint write",
    "after_step, last": "a step",
    "write of metrics": "a write of metrics.json",
}
MAX_COUNTS = {
    "fetch": 4,
    "evaluation": 3,
    "write": 4,
    "a step during a save": 6,
    "before_train": 3,
    "after_train": 3,
}
MAX_COUNTS |= {"write of metrics": 2}
MAX_COUNTS |= {
    f"{when} {call}": count
    for when in ("before", "after")
    for call, count in (("fsync", 6), ("rename", 3))
}

# the files that every run has to write
FILES = ("model_final.pth", "model_best.pth", "last_checkpoint", "finished", "metrics.json")
# parts of a checkpoint without which the result is the same -> the reason
NOT_MISSED = {
    "iteration": "a copy of trainer/iteration, for other readers of the file",
    "run_id": "says which run has written the file; last_checkpoint names it",
    "trainer/world_size": "is the same in the resumed run",
    "trainer/end": "is the same in the resumed run, which no hook has ended early",
    "trainer/origin": "says how the run was started, and the resumed run has its own; it has no parents",
    "trainer/hooks/FinalEvalHook": "has done nothing yet",
    "trainer/data_size": "is compared with the data of the resumed run, and is the same",
    "trainer/_trainer/optimizer_groups": "is compared with the names of the resumed run, in the same order",
    "trainer/_trainer/non_finite": "there was none",
    "trainer/_trainer/grad_scaler": "bfloat16 needs none",
}

PROCESSES = (1, 2, 4)
TIMEOUT_SEC = 300  # time limit of a start
GRACE_SEC = 60  # time for the processes of a start to end after it


# ---------------------------------------------------------------------------- one start of a run


@dataclass
class Kill:
    """A kill at the ``count``-th time that ``rank`` passes a point, from iteration ``iter`` on."""

    point: str
    iter: int
    count: int = 1
    rank: int = 0
    alone: bool = False  # the other ranks are not killed
    processes: int = 0  # number of processes of this start; 0: as the command says

    def __str__(self) -> str:
        return f"{self.point}, no. {self.count}" if self.point in MAX_COUNTS else self.point


@dataclass
class Start:
    """The outcome of one start."""

    kill: Kill | None
    checkpoint: str  # the checkpoint from which it was resumed
    code: int = 0
    start_iter: int = -1
    killed_at: int = -1
    by: str = ""
    defects: list[str] = field(default_factory=list)

    @property
    def is_hit(self) -> bool:
        return self.code in (-signal.SIGKILL, 128 + signal.SIGKILL) and self.killed_at >= 0


class Job:
    """Starts runs of the job, each in a folder below ``args.output_dir``."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.num_starts = 0

    def start(self, folder: Path, kill: Kill | None = None, without: str = "") -> Start:
        """Run the command once, until it ends or is killed."""
        self.num_starts += 1
        log = self._args.output_dir / "starts" / f"{self.num_starts:03d}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        start = Start(
            kill, os.path.basename(Checkpointer(nn.Identity(), folder).get_checkpoint_file())
        )
        # with SEED -1, the first starts of all runs draw the same seed; later starts draw another one, which must have
        # no effect
        entropy = None if start.checkpoint else self._args.seed
        report = log.with_suffix(".jsonl")
        plan = {
            "kill": kill and asdict(kill),
            "without": without,
            "entropy": entropy,
            "report": str(report),
        }
        processes = kill.processes if kill and kill.processes else self._args.processes
        options = {
            "seed": self._args.seed,
            "config-seed": self._args.config_seed,
            "processes": processes,
        }
        options |= {"logical-ranks": self._args.logical_ranks}
        command = [sys.executable, str(JOB), "--resume", "--output-dir", str(folder)]
        command += itertools.chain.from_iterable(
            (f"--{name}", str(value)) for name, value in options.items()
        )
        environment = os.environ | {"TRAINKIT_CHAOS": json.dumps(plan), "OMP_NUM_THREADS": "1"}
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                start_new_session=True,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                start.code = process.wait(TIMEOUT_SEC)
            except subprocess.TimeoutExpired:
                start.defects.append(f"start {self.num_starts} hangs, see {log}")
                os.killpg(process.pid, signal.SIGKILL)
                start.code = process.wait()
        if not _wait_for_group(process.pid):
            start.defects.append(f"start {self.num_starts} leaves processes behind")
        for line in report.read_text().splitlines() if report.exists() else []:
            for name, value in json.loads(line).items():
                setattr(start, name, value)
        if start.code and not start.is_hit:
            start.defects.append(f"start {self.num_starts} fails with code {start.code}, see {log}")
        return start


def _adopt_orphans() -> None:
    """Make this process the parent of processes whose parents die, so that it can wait for them."""
    pr_set_child_subreaper = 36  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def _wait_for_group(group: int) -> bool:
    """Wait for all processes of a group, and kill them after a while; returns whether all ended by themselves."""
    deadline, in_time = time.monotonic() + GRACE_SEC, True
    while True:
        try:
            os.waitpid(-group, os.WNOHANG)
        except ChildProcessError:
            return in_time
        if in_time and time.monotonic() > deadline:
            in_time = False
            os.killpg(group, signal.SIGKILL)
        time.sleep(0.01)


# ---------------------------------------------------------------------------- where to kill


class Planner:
    """Draws kills, each some iterations after its start, so that the run makes progress.

    Attributes:
        num_left: the number of kills still to do.
    """

    def __init__(self, args: argparse.Namespace, num_iters: int) -> None:
        self._rng = random.Random(args.seed)
        self._nums_processes = [args.processes]
        if args.logical_ranks:
            self._nums_processes = [num for num in PROCESSES if num <= args.logical_ranks]
        self._num_iters = num_iters  # length of the whole run
        self._num_kills, self.num_left, self._num_fresh = args.kills, args.kills, 0
        self._points: Iterator[str] = iter(())

    def next(self, begin: int) -> Kill:
        """The next kill, for a process that continues after ``begin`` iterations; 0 means without a checkpoint."""
        rng, point = self._rng, self._next_point()
        first = begin + rng.randint(1, max(2, 2 * (self._num_iters - begin) // (self.num_left + 1)))
        if begin == 0:
            self._num_fresh += 1
            # four of five kills must follow a resume
            if 5 * (self._num_fresh + 1) > self._num_kills:
                first = max(first, SURE_OF_CHECKPOINT)
                point = "forward" if point == "before_train" else point
        if self.num_left == 1 and rng.random() < 0.5:
            point = "after_train"
        kill = Kill(point, 0 if point == "before_train" else min(first, self._num_iters - 2))
        kill.count = rng.randint(1, MAX_COUNTS.get(point, 1))
        kill.processes = (
            rng.choice(self._nums_processes)
            if self._nums_processes[1:]
            else self._nums_processes[0]
        )
        kill.rank = 0 if "write" in POINTS.get(point, "") else rng.randrange(kill.processes)
        kill.alone = kill.processes > 1 and rng.random() < 0.3
        return kill

    def _next_point(self) -> str:
        """All points are used before one is used again."""
        point = next(self._points, None)
        if point is None:
            self._points = iter(self._rng.sample(sorted(POINTS), len(POINTS)))
            point = next(self._points)
        return point


# ---------------------------------------------------------------------------- the comparison


def differences(left: Path, right: Path) -> list[str]:
    """The places where two folders of runs differ: files, entries of checkpoints (all bits), lines of metrics.json."""
    found = [
        f"{name}: absent in {folder}"
        for folder in (left, right)
        for name in FILES
        if not (folder / name).exists()
    ]
    found += [
        f"{path}: a leftover" for folder in (left, right) for path in folder.rglob("*.trainkit-tmp")
    ]
    return found + list(differing(_contents(left), _contents(right)))


def _contents(folder: Path) -> dict[str, Any]:
    """file -> its content"""
    return {
        path.name: _content(path)
        for path in sorted(folder.iterdir())
        if not any(map(path.match, UNCOMPARED_FILES))
    }


def _content(path: Path) -> Any:
    if path.suffix == ".pth":
        return torch.load(path, weights_only=True)
    lines = path.read_text().splitlines() if path.is_file() else ["a folder"]
    rows = [
        json.loads(line) if line.startswith("{") and line.endswith("}") else line for line in lines
    ]
    return [
        row
        for row in rows
        if isinstance(row, str) or row.keys() - CLOCK_READINGS - {"iteration", "epoch"}
    ]


def differing(left: Any, right: Any) -> Iterator[str]:
    """The places where two nested values differ bit by bit, without clock readings."""
    return checkpoints.differing(left, right, skip=_is_of_the_clock)


def _is_of_the_clock(key: Any, path: str) -> bool:
    file, _, inside = path.partition("/")
    if file == RUN_ID:  # which run it is
        return True
    return is_of_the_clock(inside) if file.endswith(".pth") else key in CLOCK_READINGS


# ---------------------------------------------------------------------------- the two experiments

# The first kill comes some log lines after a save. At the second, the final checkpoint exists already.
CONTROL_KILLS = (Kill("a step, all saved", 72), Kill("after_train", 0, count=3))


def kill_and_compare(args: argparse.Namespace) -> list[str]:
    """Kill, resume, and print the table; returns the differences from the run that was not killed."""
    job, reference, runs = Job(args), args.output_dir / "reference", [args.output_dir / "killed_1"]
    found = job.start(reference).defects
    starts: list[Start] = []
    planner = Planner(args, _num_iters_done(reference))
    while not found and not (starts and starts[-1].code == 0 and planner.num_left == 0):
        # the run ended before the last kill: another run gets the other kills
        if starts and starts[-1].code == 0:
            runs.append(args.output_dir / f"killed_{len(runs) + 1}")
        kill = planner.next(_num_iters_done(runs[-1])) if planner.num_left else None
        starts.append(job.start(runs[-1], kill))
        print(f"{len(starts):3}  {_describe(starts[-1])}", flush=True)
        planner.num_left -= starts[-1].is_hit
        found += starts[-1].defects
    _print_table(starts)
    for run in runs if not found else []:
        found += differences(reference, run)
    return found


def leave_out_and_compare(
    output_dir: Path, resume: Callable[[Path, str], object], only: str = ""
) -> dict[str, list[str]]:
    """The differences if a killed run continues without a part of its checkpoint; for each part, and for "" (no part).

    Args:
        output_dir: has the folders "reference" (the run that was not killed), "killed_1" and so on.
        resume: called with a copy of one of the killed folders and the part.
        only: leave out this part instead of each part.
    """
    found: dict[str, list[str]] = {}
    for killed in sorted(output_dir.glob("killed_*")):
        for part in ["", *([only] if only else parts_of(_last_checkpoint(killed)))]:
            if part and found.get(part):
                continue  # an earlier folder has shown that this part is missed
            folder = output_dir / f"without_{part.replace('/', '_')}_in_{killed.name}"
            shutil.copytree(killed, folder)
            resume(folder, part)
            found.setdefault(part, []).extend(differences(output_dir / "reference", folder))
    return found


def _leave_out(args: argparse.Namespace) -> list[str]:
    args.config_seed = -1  # if the seed is not saved, a new one is drawn
    job = Job(args)

    def start(folder: Path, part: str = "", kill: Kill | None = None) -> None:
        # the run has to end, so that it can be compared
        if defects := job.start(folder, kill, part).defects:
            raise SystemExit(defects[0])

    start(args.output_dir / "reference")
    for number, kill in enumerate(CONTROL_KILLS):
        start(args.output_dir / f"killed_{number}", kill=kill)
    found = leave_out_and_compare(
        args.output_dir, start, "" if args.without == "all" else args.without
    )
    rows = [
        (part or "nothing", len(lines), lines[0] if lines else NOT_MISSED.get(part))
        for part, lines in found.items()
    ]
    print(tabulate(rows, ["without", "differences", "the first, or why there is none"]))
    return [
        part or "nothing"
        for part, lines in found.items()
        if bool(lines) == (part in ("", *NOT_MISSED))
    ]


def _last_checkpoint(folder: Path) -> dict[str, Any]:
    path = Checkpointer(nn.Identity(), folder).get_checkpoint_file()
    return read_file(path) if path else {}


def _num_iters_done(folder: Path) -> int:
    return _last_checkpoint(folder).get("iteration", -1) + 1


_HEADER = (
    "point",
    "processes",
    "at or after",
    "killed at",
    "in",
    "resumed from",
    "starts at",
    "exit code",
)


def _row(start: Start) -> tuple[Any, ...]:
    kill = start.kill
    where: tuple[Any, ...] = ("none", "", "", "")
    if kill:
        where = (
            str(kill),
            kill.processes,
            kill.iter,
            start.killed_at if start.is_hit else "MISSED",
        )
    return *where, start.by, start.checkpoint or "-", start.start_iter, start.code


def _describe(start: Start) -> str:
    """A line that describes a start; it is printed while the next start runs."""
    end = (
        f"killed in iteration {start.killed_at}: {start.kill}"
        if start.is_hit
        else f"ended with code {start.code}"
    )
    return f"resumed from {start.checkpoint}, {end}" if start.checkpoint else f"started, {end}"


def _print_table(starts: list[Start]) -> None:
    print(
        tabulate([(number, *_row(start)) for number, start in enumerate(starts, 1)], ["", *_HEADER])
    )
    hits = [start for start in starts if start.is_hit and start.kill]
    missed = sum(start.kill is not None and not start.is_hit for start in starts)
    places = Counter(POINTS.get(start.kill.point, "the end") for start in hits if start.kill)
    print(
        f"{len(hits)} kills ({missed} more were planned and missed): "
        + ", ".join(f"{count} in {place}" for place, count in places.items())
        + f"; {sum(bool(start.checkpoint) for start in hits)} follow a resume from a checkpoint, "
        + f"{sum(start.kill.alone for start in hits if start.kill)} were of one rank only"
    )


def main(args: argparse.Namespace) -> int:
    """Run, and return the exit code."""
    if args.output_dir is None:
        args.output_dir = Path(tempfile.mkdtemp(prefix="chaos_"))
    _adopt_orphans()
    print(f"Runs, and a log of each start, are in {args.output_dir}")
    found = _leave_out(args) if args.without else kill_and_compare(args)
    for _, lines in itertools.groupby(found, lambda line: line.partition("/")[0]):
        print(*itertools.islice(lines, 5), sep="\n")
    verdicts = ("seen", "not seen") if args.without else ("identical", "different")
    print(verdicts[bool(found)] + (f": {found[0]}" if found else ""))
    return bool(found)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--seed", type=int, default=0, help="chooses the kills and the variant of the job"
    )
    parser.add_argument("--config-seed", type=int, default=0, help="SEED of the job; -1: draw one")
    parser.add_argument("--processes", type=int, choices=PROCESSES, default=1)
    parser.add_argument(
        "--logical-ranks", type=int, choices=(0, *PROCESSES), default=0, help="of the job; 0: none"
    )
    parser.add_argument("--output-dir", type=Path, help="a new folder; default is a temporary one")
    parser.add_argument(
        "--without",
        default="",
        metavar="PART",
        help="the control: a part such as trainer/rng, or all",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(parse_args()))
