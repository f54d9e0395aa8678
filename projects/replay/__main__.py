"""Repeat a step of a past run, from its checkpoints, and inspect it.

::

    python -m trainkit.projects.replay RUN --iter 500              # tables, and whether the step is reproducible
    python -m trainkit.projects.replay RUN --iter 500 --prove      # to the next checkpoint, and compare every byte
    python -m trainkit.projects.replay RUN/capsule.rank0.pt        # the step in which the run failed, in seconds
    python -m trainkit.projects.replay RUN --iter 500 -- python train.py   # with a command of yours
    torchrun --nproc-per-node 2 -m trainkit.projects.replay RUN --iter 500 # a run of two processes
    python -m trainkit.projects.replay RUN --range 200:400 --hook mine.py:MyHook  # a new hook, over past iterations

The tool starts the command of the run again, in a folder that it deletes afterwards, and takes over its training. It
does not change the files of the run. **It runs the command in the checkpoint** only if its code is in the project of
the current folder; if not, give the command after ``--`` (docs/security.md). The exit code is 0; 1 if something differs
from the run or between executions; 2 if the step cannot be repeated.
"""

import argparse
import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from trainkit.projects.replay.bisect import find_samples
from trainkit.projects.replay.checkpoints import checkpoints_of
from trainkit.projects.replay.hindsight import replay_range
from trainkit.projects.replay.origin import checkpoints_with_origin
from trainkit.projects.replay.report import as_dict, as_text
from trainkit.projects.replay.search import first_bad, worst
from trainkit.projects.replay.step import replay

from trainkit.config import ConfigError
from trainkit.engine import user_errors_exit


def main(args: argparse.Namespace) -> int:
    """Run, and return the exit code."""
    if args.first_bad or args.worst:
        with user_errors_exit(), contextlib.redirect_stdout(sys.stderr):
            text = search(args)
        if is_main():
            print(text)
        return 0
    if args.range:
        with user_errors_exit():
            return run_hook(args)
    # the output of the run's script is not part of the report
    with user_errors_exit(), contextlib.nullcontext() if args.pdb else contextlib.redirect_stdout(sys.stderr):
        options = {"save_state": args.save_state, "prove": args.prove, "verdict": not (args.once or args.parts)}
        options |= {"anomaly": args.anomaly, "debug": args.pdb, "find_samples": find_samples if args.bisect else None}
        found = replay(args.run, args.iter, args.command, **options)
    if args.parts:
        Path(args.parts).write_text(json.dumps({"parts": found.inspection.parts, "values": found.values}))
    elif is_main():
        if args.save_batch:
            torch.save(found.batch, args.save_batch)
        print(json.dumps(as_dict(found), indent=1) if args.json else as_text(found, args.module))
    return int(not found.is_equal)


def search(args: argparse.Namespace) -> str:
    """Run ``--first-bad`` or ``--worst``; returns what is printed."""
    if args.worst:
        if not args.range:
            raise ConfigError(f"--worst {args.worst} needs --range A:B")
        return worst(args.run, *args.range, args.worst, args.command)
    last = args.iter
    if last is None:
        ends = [*checkpoints_with_origin(map(str, Path(args.run).glob("capsule.rank*.pt"))), *checkpoints_of(args.run)]
        last = max((saved.iteration for saved in ends), default=0)
    return first_bad(args.run, last, args.quantity, args.times, args.command)


def run_hook(args: argparse.Namespace) -> int:
    """Run ``--range``; returns the exit code."""
    (first, end), out = args.range, Path(args.out or f"replay_of_{Path(args.run).resolve().name}")
    file, _, name = (args.hook or "").rpartition(":")
    if not 0 <= first < end or args.iter is not None or not os.path.isfile(file):
        accepted = "--range A:B with 0 <= A < B, --hook FILE:CLASS of a file, and no --iter"
        raise ConfigError(f"accepted: {accepted}; got --range {first}:{end}, --hook {args.hook}, --iter {args.iter}")
    if Path(args.run).resolve() in [out.resolve(), *out.resolve().parents]:
        raise ConfigError(f"--out is {out}, in the folder of the run, which is not changed; name another one")
    if (make_hook := runpy.run_path(file).get(name)) is None:
        raise ConfigError(f"--hook is {args.hook}, but {file} has no {name!r}; name a class of this file")
    with contextlib.redirect_stdout(sys.stderr):
        line = replay_range(args.run, first, end, make_hook, out, args.command)
    if is_main():
        print(line, f"written: {out / 'metrics.json'}", sep="\n")
    return int("DIFFERENT" in line or "FAILED" in line)


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
    add("--once", action="store_true", help="perform the step only once, without a verdict")
    add("--bisect", action="store_true", help="find the samples with which the step fails")
    add("--parts", default="", help=argparse.SUPPRESS)  # a replay reads this file of the one that it has started
    add("--module", default="", metavar="PATTERN", help="modules and parameters to show, such as layers.*")
    add("--json", action="store_true", help="print all results as JSON")
    add("--save-batch", default="", metavar="FILE", help="write the batch with torch.save")
    add("--save-state", default="", metavar="FILE", help="write the state before the step as a checkpoint")
    add("--anomaly", action="store_true", help="let autograd name the operation with the first NaN")
    add("--pdb", action="store_true", help="stop in the debugger before the forward pass")
    add("--range", type=iterations, metavar="A:B", help="repeat these iterations, not one step; B is not included")
    add("--first-bad", action="store_true", help="find the first step, up to --iter or the end, that is out of band")
    add("--quantity", default="loss", help="for --first-bad: loss, grad_norm, weight, a module, or Python of trainer")
    add("--times", type=float, default=10.0, help="for --first-bad: the band is this many times the running median")
    add("--worst", type=int, default=0, metavar="N", help="list the N steps of --range with the largest losses")
    add("--hook", metavar="FILE:CLASS", help="the hook to run over the range; its class gets no arguments")
    add("--out", metavar="FOLDER", help="the folder for metrics.json of the range; default: replay_of_<RUN>")
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.command = words[end + 1 :] or None
    if end < len(words) and args.command is None:
        parser.error("got -- without a command; give one, such as `-- python train.py`")
    return args


if __name__ == "__main__":
    sys.exit(main(parse_args()))
