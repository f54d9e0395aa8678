#!/usr/bin/env python
"""Perform a step of a past run once more, from its checkpoints, and look at it.

::

    python tools/replay.py output/digits --iter 500            # tables, and whether the step is reproducible
    python tools/replay.py output/digits --iter 500 --prove    # on to the next checkpoint, and compare every byte
    python tools/replay.py output/digits/capsule.rank0.pt      # the step in which the run has failed, in seconds
    torchrun --nproc-per-node 2 tools/replay.py RUN --iter 500 # a run of two processes

The command of the run is given once more in a folder that is deleted afterwards, and its training is taken over; the
files of the run stay as they are. **It runs the code of the run.** The exit code is 0; 1 if something differs from the
run or between executions; 2 if the step cannot be performed.
"""

import argparse
import contextlib
import json
import os
import sys

import torch

from trainkit.engine import user_errors_exit
from trainkit.replay import replay


def main(args: argparse.Namespace) -> int:
    """The exit code."""
    # what the script of the run prints is no part of the report
    with user_errors_exit(), contextlib.nullcontext() if args.pdb else contextlib.redirect_stdout(sys.stderr):
        files = {"profile": args.profile, "save_state": args.save_state}
        options = {"prove": args.prove, "verdict": not args.once, "bisect": args.bisect}
        options |= {"anomaly": args.anomaly, "debug": args.pdb}
        found = replay(args.run, args.iter, args.script, **options, **files)
    if int(os.environ.get("RANK", "0")) == 0:
        if args.save_batch:
            torch.save(found.batch, args.save_batch)
        print(json.dumps(found.as_dict(), indent=1) if args.json else found.text(args.module))
    return int(not found.is_equal)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="the folder with the checkpoints of a run, or the capsule of a step")
    parser.add_argument("--iter", type=int, help="the step of a run, counted from 0 as in logs")
    parser.add_argument("--prove", action="store_true", help="go on to the next checkpoint, and compare every byte")
    parser.add_argument("--once", action="store_true", help="perform the step once; there is no verdict then")
    parser.add_argument("--bisect", action="store_true", help="find the samples with which the step fails")
    parser.add_argument("--script", metavar="FILE", help="start this script, with the arguments of the run")
    parser.add_argument("--module", default="", metavar="PATTERN", help="modules and parameters to show, as layers.*")
    parser.add_argument("--json", action="store_true", help="everything that was found, as JSON")
    parser.add_argument("--save-batch", default="", metavar="FILE", help="write the batch by torch.save")
    parser.add_argument(
        "--save-state", default="", metavar="FILE", help="write the state before the step, a checkpoint"
    )
    parser.add_argument("--profile", default="", metavar="FILE", help="write a trace of the step, for chrome://tracing")
    parser.add_argument(
        "--anomaly", action="store_true", help="have autograd name the operation that gives the first NaN"
    )
    parser.add_argument("--pdb", action="store_true", help="stop in the debugger before the forward pass")
    args = parser.parse_args(arguments)
    if os.path.isfile(args.run):
        if args.iter is not None or args.prove:
            parser.error(f"{args.run} is a capsule, which holds one step: leave out --iter and --prove")
    elif args.iter is None:
        parser.error(f"--iter is missing: {args.run} is a run; give the step, counted from 0 as in logs")
    return args


if __name__ == "__main__":
    sys.exit(main(parse_args()))
