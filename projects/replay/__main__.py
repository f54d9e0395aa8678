"""Repeat a step of a past run, from its checkpoints, and inspect it.

::

    python -m trainkit.projects.replay RUN --iter 500              # tables, and whether the step is reproducible
    python -m trainkit.projects.replay RUN --iter 500 --prove      # to the next checkpoint, and compare every byte
    python -m trainkit.projects.replay RUN/capsule.rank0.pt        # the step in which the run failed, in seconds
    python -m trainkit.projects.replay RUN --iter 500 -- python train.py   # with a command of yours
    torchrun --nproc-per-node 2 -m trainkit.projects.replay RUN --iter 500 # a run of two processes
    python -m trainkit.projects.replay RUN --range 200:400 --hook mine.py:MyHook --jobs 4  # a new hook

The tool starts the command of the run again, in a folder that it deletes afterwards, and takes over its training. It
does not change the files of the run. **It runs the command in the checkpoint** only if its code is in the project of
the current folder; if not, give the command after ``--`` (docs/security.md). The exit code is 0; 1 if something differs
from the run or between executions; 2 if the step cannot be repeated.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from trainkit.projects.replay.bisect import find_samples
from trainkit.projects.replay.checkpoints import around, checkpoints_of
from trainkit.projects.replay.hindsight import replay_range
from trainkit.projects.replay.report import as_dict, as_text
from trainkit.projects.replay.step import replay

from trainkit.config import ConfigError
from trainkit.engine import user_errors_exit


def main(args: argparse.Namespace) -> int:
    """Run, and return the exit code."""
    if args.range:
        with user_errors_exit():
            return run_hook(args)
    # the output of the run's script is not part of the report
    with user_errors_exit(), contextlib.nullcontext() if args.pdb else contextlib.redirect_stdout(sys.stderr):
        files = {"profile": args.profile, "save_state": args.save_state}
        options = {"prove": args.prove, "verdict": not args.once, "find_samples": find_samples if args.bisect else None}
        options |= {"anomaly": args.anomaly, "debug": args.pdb}
        found = replay(args.run, args.iter, args.command or args.script, **options, **files)
    if is_main():
        if args.save_batch:
            torch.save(found.batch, args.save_batch)
        print(json.dumps(as_dict(found), indent=1) if args.json else as_text(found, args.module))
    return int(not found.is_equal)


def run_hook(args: argparse.Namespace) -> int:
    """Run ``--range``, each part between two checkpoints in its own process; returns the exit code."""
    (first, end), out = args.range, Path(args.out or f"replay_of_{Path(args.run).resolve().name}")
    file, _, name = (args.hook or "").rpartition(":")
    if args.iter is not None or not os.path.isfile(file) or args.jobs < 1:
        text = f"got --hook {args.hook}, --jobs {args.jobs}, --iter {args.iter}"
        raise ConfigError(f"--range takes --hook FILE:CLASS of a file, --jobs of at least 1, and no --iter; {text}")
    if Path(args.run).resolve() in [out.resolve(), *out.resolve().parents]:
        raise ConfigError(f"{out} is in the folder of the run, which is not changed; name another one with --out")
    if (make_hook := runpy.run_path(file).get(name)) is None:
        raise ConfigError(f"--hook is {args.hook}, but {file} has no {name!r}; name a class of this file")
    parts, step_sec = stretches(args.run, first, end)
    jobs = min(args.jobs, len(parts)) if int(os.environ.get("WORLD_SIZE", "1")) == 1 else 1
    num_steps = end - parts[0].start if jobs == 1 else sum(part.end - part.start for part in parts)
    time = timedelta(seconds=math.ceil(num_steps * step_sec / jobs))
    cost = f"{num_steps} iterations with --jobs {jobs}, about {time}, and the time to start the run"
    if is_main():
        print(f"iterations {first} to {end - 1} from {len(parts)} checkpoints: {cost}", flush=True)
    if jobs == 1:
        with contextlib.redirect_stdout(sys.stderr):
            lines, failed = [replay_range(args.run, first, end, make_hook, out, args.command or args.script)], False
    else:
        lines, failed = run_in_parallel(args, parts, jobs, out)
    if is_main():
        print("\n".join([*lines, f"written: {out / 'metrics.json'}"]))
    return int(failed or any("DIFFERENT" in line or "FAILED" in line for line in lines))


class Stretch(NamedTuple):
    """Iterations ``first`` to ``end`` - 1; to reach them, a replay starts with iteration ``start``."""

    start: int
    first: int
    end: int


def stretches(run: str | os.PathLike[str], first: int, end: int) -> tuple[list[Stretch], float]:
    """Cut a range of iterations at the checkpoints of a run.

    Returns:
        The parts, which can run at the same time, and the median time of a step in seconds (0 if it is not known).

    Raises:
        CheckpointError: no checkpoint can be used.
        ConfigError: the range is empty.
    """
    if not 0 <= first < end:
        raise ConfigError(f"--range is {first}:{end}; accepted: A:B with 0 <= A < B, B is not included")
    around(os.fspath(run), first)  # raises the CheckpointError
    found = checkpoints_of(os.fspath(run))
    starts = [0, *(saved.iteration + (saved.stage == 2) for saved in found)]
    cuts = sorted({first, end, *(start for start in starts if first < start < end)})
    parts = [
        Stretch(max(start for start in starts if start <= cut), cut, after) for cut, after in itertools.pairwise(cuts)
    ]
    history = found[-1].state["trainer"]["storage"]["histories"].get("time") if found else None
    return parts, 0.0 if history is None else statistics.median(history["values"].tolist())


def run_in_parallel(args: argparse.Namespace, parts: list[Stretch], jobs: int, out: Path) -> tuple[list[str], bool]:
    """Start this command once for each part; returns the lines that they print, and whether one has failed."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:

        def run_part(part: Stretch) -> subprocess.CompletedProcess[str]:
            options = ["--range", f"{part.first}:{part.end}", "--hook", args.hook, "--out", f"{folder}/{part.first}"]
            script = ["--script", args.script] if args.script else ["--", *args.command] if args.command else []
            return subprocess.run(
                [sys.executable, "-m", "trainkit.projects.replay", args.run, *options, *script],
                stdout=subprocess.PIPE,
                text=True,
            )

        done = [*pool.map(run_part, parts)]
        files = [Path(folder, str(part.first), "metrics.json") for part in parts]
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.json").write_text("".join(file.read_text() for file in files if file.exists()))
    lines = [line for found in done for line in found.stdout.splitlines()[1:-1]]  # without the lines on cost and file
    return lines, any(found.returncode for found in done)


def is_main() -> bool:
    """Whether this process prints; there may be no process group yet."""
    return os.environ.get("RANK", "0") == "0"


def iterations(text: str) -> tuple[int, int]:
    """The two numbers of ``A:B``."""
    first, _, end = text.partition(":")
    return int(first), int(end)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] RUN [-- python train.py ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add: Any = parser.add_argument
    add("run", metavar="RUN", help="the folder with the checkpoints of a run, or the capsule of a step")
    add("--iter", type=int, help="the step of a run, counted from 0 as in metrics.json")
    add("--prove", action="store_true", help="continue to the next checkpoint, and compare every byte")
    add("--once", action="store_true", help="repeat the step only once, without a verdict")
    add("--bisect", action="store_true", help="find the samples with which the step fails")
    add("--script", metavar="FILE", help="start this script, with the arguments of the run")
    add("--module", default="", metavar="PATTERN", help="modules and parameters to show, such as layers.*")
    add("--json", action="store_true", help="print all results as JSON")
    add("--save-batch", default="", metavar="FILE", help="write the batch with torch.save")
    add("--save-state", default="", metavar="FILE", help="write the state before the step as a checkpoint")
    add("--profile", default="", metavar="FILE", help="write a trace of the step, for chrome://tracing")
    add("--anomaly", action="store_true", help="let autograd name the operation with the first NaN")
    add("--pdb", action="store_true", help="stop in the debugger before the forward pass")
    add("--range", type=iterations, metavar="A:B", help="repeat these iterations, not one step; B is not included")
    add("--hook", metavar="FILE:CLASS", help="the hook to run over the range; its class gets no arguments")
    add("--jobs", type=int, default=1, metavar="K", help="run K processes at a time, one for each checkpoint")
    add("--out", metavar="FOLDER", help="the folder for metrics.json of the range; default: replay_of_<RUN>")
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.command = words[end + 1 :]
    if end < len(words) and (args.script or not args.command):
        parser.error("give a command after --, such as -- python train.py, and no --script")
    return args


if __name__ == "__main__":
    sys.exit(main(parse_args()))
