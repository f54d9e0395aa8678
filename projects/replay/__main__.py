"""Repeat a step of a past run, from its checkpoints, and inspect it.

::

    python -m trainkit.projects.replay RUN --iter 500 -- python train.py           # tables; is it reproducible?
    python -m trainkit.projects.replay RUN/capsule.rank0.pt -- python train.py     # the step that failed, in seconds
    python -m trainkit.projects.replay RUN --range 200:400 --hook mine.py:MyHook -- python train.py   # a new hook

After ``--`` stands the command of the run; without it the tool shows the command that the file names, and ends: a file
never chooses code. The files of the run are only read. The exit code is 0; 1 if something differs from the run or
between executions; 2 if the step cannot be repeated.
"""

import argparse
import contextlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from trainkit.projects.replay.search import first_bad, is_equal, replay_range, worst
from trainkit.projects.replay.session import FailedOnTheWay
from trainkit.projects.replay.step import replay

from trainkit.config import ConfigError
from trainkit.engine import user_errors_exit


def main(args: argparse.Namespace) -> int:
    # the output of the run's script is not part of the report
    with user_errors_exit(), contextlib.redirect_stdout(sys.stderr):
        try:
            text, equals_run = _answer(args)
        except FailedOnTheWay as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if os.environ.get("RANK", "0") == "0":  # there may be no process group yet
        print(text)
    return int(not equals_run)


def _answer(args: argparse.Namespace) -> tuple[str, bool]:
    """The text to print, and whether it says that all equals the run, as far as it was compared."""
    if args.range or args.first_bad:
        text = _answer_of_many(args)
        return text, is_equal(text)
    found = replay(
        args.run,
        args.iter,
        args.command,
        prove=args.prove,
        verdict=not args.once,
        bisect=args.bisect,
    )
    return str(found), found.is_equal


def _answer_of_many(args: argparse.Namespace) -> str:
    if args.first_bad:
        return first_bad(args.run, args.iter, args.quantity, args.times, args.command)
    if args.worst:
        return worst(args.run, *args.range, args.worst, args.command)
    run = Path(args.run).resolve()
    file, _, name = args.hook.rpartition(":")
    out = Path(args.out or f"replay_of_{run.name}")
    if run in [out.resolve(), *out.resolve().parents]:
        raise ConfigError(
            f"--out is {out}, in the folder of the run, which is not changed; name another one"
        )
    if not os.path.isfile(file):
        raise ConfigError(f"--hook is {args.hook!r}; accepted with --range: FILE.py:CLASS")
    first, end = args.range
    hook_class = runpy.run_path(file)[name]
    line = replay_range(args.run, first, end, hook_class, out, args.command)
    return f"{line}\nwritten: {out / 'metrics.json'}"


def iterations(text: str) -> tuple[int, int]:
    """The two numbers of ``A:B``."""
    first, end = map(int, text.split(":"))
    if not 0 <= first < end:
        raise ValueError
    return first, end


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] RUN -- python train.py ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add: Any = parser.add_argument
    add(
        "run",
        metavar="RUN",
        help="the folder with the checkpoints of a run, or the capsule of a step",
    )
    add("--iter", type=int, help="the step of a run, counted from 0 as in metrics.json")
    add(
        "--prove",
        action="store_true",
        help="continue to the next checkpoint, and compare every byte",
    )
    add("--once", action="store_true", help="perform the step only once, without a verdict")
    add("--bisect", action="store_true", help="find the samples with which the step fails")
    add(
        "--first-bad",
        action="store_true",
        help="find the first step, up to --iter or the end, that is out of band",
    )
    add(
        "--quantity",
        default="loss",
        help="for --first-bad: loss, grad_norm, weight, a module, or Python of trainer",
    )
    add(
        "--times",
        type=float,
        default=10.0,
        help="for --first-bad: the band is this many times the running median",
    )
    add(
        "--range",
        type=iterations,
        metavar="A:B",
        help="repeat these iterations, not one step; B is not included",
    )
    add(
        "--worst",
        type=int,
        default=0,
        metavar="N",
        help="list the N steps of --range with the largest losses",
    )
    add(
        "--hook",
        default="",
        metavar="FILE:CLASS",
        help="the hook to run over --range; its class gets no arguments",
    )
    add(
        "--out",
        metavar="FOLDER",
        help="the folder for metrics.json of the hook; default: replay_of_<RUN>",
    )
    given = sys.argv[1:] if arguments is None else arguments
    words = [*given, "--"]
    end = words.index("--")
    args = parser.parse_args(words[:end])
    args.command = words[end + 1 : -1] or None
    return args


if __name__ == "__main__":
    sys.exit(main(parse_args()))
