#!/usr/bin/env python
"""Measure the time and memory that trainkit needs, and compare each row with its goal.

::

    python tools/benchmark.py --rows step,save --rounds 15 --json benchmark.json

prints the machine, the bare loop, and a table. The compared variants run in alternating rounds in the same process; a
ratio is the median of the ratios within the rounds. The table shows missed goals; they do not change the exit code,
which is 2 for wrong arguments.
"""

import argparse
import datetime
import inspect
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks import (
    averaging,
    checkpoint,
    cuda,
    graph,
    history,
    imports,
    job,
    loader,
    peers,
    ranks,
    resume,
    step,
)
from benchmarks.measure import Row
from tabulate import tabulate
from trainkit.projects.finders.command import positive

HEADERS = ["row", "value", "goal", "", "of"]

ROWS: dict[str, Callable[..., list[Row]]] = {
    "step": step.step,
    "history": history.history,
    "memory": history.memory,
    "ema": averaging.ema,
    "save": checkpoint.save,
    "import": imports.imports,
    "resume": resume.resume,
    "ranks": ranks.ranks,
    "logical": ranks.logical,
    "loader": loader.loader,
    "cuda": cuda.cuda,
    "graph": graph.graph,
}

FEW_STEPS = 1_000_000  # steps of the memory row without --full


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmark.py",
        usage="%(prog)s [options]",  # one line, because it is printed before every error
        description="Measure the time and memory that trainkit needs.",
        allow_abbrev=False,
    )
    rows, others = ",".join(ROWS), ",".join(peers.names())
    parser.add_argument(
        "--rows", type=partial(_names, "row", ROWS), default=[*ROWS], help=f"some of {rows}"
    )
    parser.add_argument(
        "--rounds", type=positive, help="this many rounds instead of each row's own number"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help=f"memory after 10 million steps, not after {FEW_STEPS:,}",
    )
    parser.add_argument(
        "--against",
        type=partial(_names, "peer", peers.names()),
        default=[],
        metavar="NAMES",
        help=f"also time other trainers in the step rows: some of {others}; those not installed are left out",
    )
    parser.add_argument(
        "--json", type=_new_file, metavar="FILE", help="write the results to this file"
    )
    parser.add_argument(
        "--markdown",
        type=_new_file,
        metavar="FILE",
        help="write the results as a part of docs/benchmarks.md",
    )
    parser.add_argument(
        "--scratch",
        type=_folder,
        metavar="FOLDER",
        help="a folder on the disk on which saves are measured",
    )
    parsed = parser.parse_args(args)
    if parsed.against and "step" not in parsed.rows:
        parser.error("--against adds to the step rows; add step to --rows")
    return parsed


def _names(kind: str, known: Collection[str], text: str) -> list[str]:
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"there is no {kind} {name!r}; there are {', '.join(known)}"
            )
    return text.split(",")


def _new_file(text: str) -> Path:
    """A path that is checked at the start: if writing failed at the end, hours would be lost."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"cannot write {text!r}; name a file in a folder that is there and writable"
        )
    return path


def _folder(text: str) -> Path:
    if not os.access(text, os.W_OK) or not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"need a folder that is there and writable, got {text!r}")
    return Path(text)


def describe_machine() -> dict[str, str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    has_gpu = torch.cuda.is_available()
    return {
        "CPU": f"{model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB",
        "GPU": f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if has_gpu else "none",
        "system": platform.platform(),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "threads": f"1 in step, history, ema, resume, ranks and loader; else {torch.get_num_threads()}",
    }


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of ``args.rows``, in their order."""
    for name in dict.fromkeys(args.rows):
        print(f"measuring {name}", file=sys.stderr)
        options: dict[str, Any] = {} if args.rounds is None else {"rounds": args.rounds}
        if name == "step":
            options["peers"] = find_peers(args.against)
        if name == "memory" and not args.full:
            options["steps"] = FEW_STEPS
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            yield from ROWS[name](scratch=Path(scratch), **options)


def find_peers(names: list[str]) -> dict[str, peers.Maker]:
    """The peers that are installed."""
    found = {name: peers.find(name) for name in names}
    for name in (name for name, make in found.items() if make is None):
        print(f"{name} is not installed and has no row", file=sys.stderr)
    return {name: make for name, make in found.items() if make is not None}


def as_markdown(record: dict[str, Any], rows: list[Row]) -> str:
    """A part of docs/benchmarks.md."""
    facts = [
        ["date", record["date"]],
        ["command", f"`{record['command']}`"],
        *record["machine"].items(),
    ]
    tables = [
        tabulate(facts, ["", ""], "github"),
        tabulate([row.as_texts() for row in rows], HEADERS, "github"),
    ]
    return "\n\n".join(tables) + "\n"


def main(args: argparse.Namespace) -> None:
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "machine": describe_machine(),
        "bare_loop": inspect.getsource(job.BareLoop),
    }
    for name, fact in record["machine"].items():
        print(f"{name}: {fact}")
    print(f"\n{record['bare_loop']}")
    rows: list[Row] = []
    try:
        for row in measure(args):
            rows.append(row)  # the rows measured so far are written, even if a later one fails
    finally:
        print(tabulate([row.as_texts() for row in rows], HEADERS))
        if args.json is not None:
            args.json.write_text(
                json.dumps({**record, "rows": [row.as_dict() for row in rows]}, indent=2) + "\n"
            )
        if args.markdown is not None:
            args.markdown.write_text(as_markdown(record, rows))


if __name__ == "__main__":
    main(parse_args())
