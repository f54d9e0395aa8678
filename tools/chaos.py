#!/usr/bin/env python
"""Kill a command at random times, resume it each time, and compare it with a run that was not killed.

::

    python tools/chaos.py --kills 5 -- python tools/train_net.py SOLVER.MAX_ITER 200

The command is run once as a whole. Then it is run again, and all its processes are killed (SIGKILL) at a random time;
it goes on with ``--resume``, until it is killed again or ends. If it ends before the last kill, another run follows.
There are more kills than asked for, up to 20, until one was between two checkpoints.
``OUTPUT_DIR`` and a folder are added to the command; if it has the word ``{folder}``, this is replaced instead.

The exit code is 0 if all runs are identical, 1 if one of them differs or fails, or if no run was continued from a
checkpoint before its last one. The job must be reproducible: a fixed
seed, and the conditions of docs/exact_resume.md. Processes that leave the group of the command, such as those of
torchrun, are not killed.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from inspect_checkpoint import compare

from trainkit.utils.logger import printable

MOST_MORE_KILLS = 20  # than those that are asked for


class Command:
    """Runs of a command; each start appends its output to a text file beside the folder of the run.

    Raises:
        RuntimeError: it ends with an error.
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def run(self, folder: Path, *options: str, limit_sec: float | None = None) -> bool:
        """Run it until it ends, or until it is killed after some seconds; returns whether it has ended."""
        log = folder.with_suffix(".txt")
        with log.open("a") as output:
            process = subprocess.Popen(
                self._in(folder, options),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_sec)
            except subprocess.TimeoutExpired:
                return False
            finally:  # also after Ctrl-C, and of workers that the command has left
                kill_group(process.pid)
                process.wait()
        if code != 0:
            raise RuntimeError(f"the command ends with the exit code {code}, see {log}")
        return True

    def _in(self, folder: Path, options: tuple[str, ...]) -> list[str]:
        words = [word.replace("{folder}", str(folder)) for word in self._words]
        if words != self._words:
            return [*words, *options]
        return [*words, *options, "OUTPUT_DIR", str(folder)]


def kill_group(group: int) -> None:
    """Kill all processes of a group; there may be none."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def kill_and_compare(words: list[str], num_kills: int, seed: int, folder: Path) -> bool:
    """Print the kills and the first differences; returns whether all runs are identical."""
    command = Command(words)
    rng = random.Random(seed)
    whole = folder / "whole"
    start = time.perf_counter()
    command.run(whole)
    whole_sec = time.perf_counter() - start
    print(f"the whole run: {whole_sec:.1f} s", flush=True)

    run = folder / "run_1"
    num_runs = 1
    num_done = 0
    are_identical = True
    num_inside = 0  # kills after a checkpoint, and before the last one
    while True:
        # others show nothing, so it goes on until there is one
        is_enough = num_done >= num_kills and num_inside > 0
        is_over = is_enough or num_done == num_kills + MOST_MORE_KILLS
        limit_sec = None if is_over else rng.uniform(0, whole_sec)
        has_ended = command.run(run, "--resume", limit_sec=limit_sec)
        if not has_ended:
            num_done += 1
            tag = last_tag(run)
            if tag and tag != last_tag(whole):
                num_inside += 1
            goes_on = f"goes on from {tag}" if tag else "starts anew"
            print(
                f"{num_done:3}  {run.name} killed after {limit_sec:5.1f} s; {goes_on}", flush=True
            )
            continue
        text, differs = compare(str(whole), str(run))
        print(printable(f"{run.name} has ended\n{text}"), flush=True)
        are_identical = are_identical and not differs
        if is_over:
            break
        num_runs += 1
        run = folder / f"run_{num_runs}"
    if num_inside == 0:
        raise RuntimeError(
            f"after none of {num_done} kills a run went on from a checkpoint before its last one, so "
            "this shows nothing: take a longer job, more checkpoints or more kills"
        )
    return are_identical


def last_tag(run: Path) -> str:
    """The checkpoint from which a run goes on; "" if it starts anew."""
    tags = list(run.rglob("last_checkpoint"))
    return tags[0].read_text().strip() if tags else ""


def main(args: argparse.Namespace) -> int:
    """Run, and return the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    try:
        are_identical = kill_and_compare(args.command, args.kills, args.seed, folder)
    except (RuntimeError, OSError) as error:  # a CheckpointError is an OSError
        print(printable(f"error: {error}"), file=sys.stderr)
        return 1
    if not are_identical:
        print(f"the runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--kills", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="draws the times; default: 0")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="trains a job")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(parse_args()))
