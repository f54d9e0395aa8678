#!/usr/bin/env python
"""Measure what trainkit costs, beside code written by hand that does the same work.

::

    python tools/benchmark.py               # all sections, about 20 minutes
    python tools/benchmark.py step save     # these
    python tools/benchmark.py --quick       # whether they run; the numbers mean nothing

prints the tables of docs/benchmarks.md as Markdown. The ways to do one work run in alternating
rounds in the same process. A ratio is the median of the ratios to the way by hand within the rounds.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from benchmarks import (
    clipping,
    evaluation,
    gpu,
    load,
    ranks,
    resume,
    samples,
    save,
    scalars,
    start,
    step,
)
from benchmarks.measure import as_table
from trainkit.projects.finders.command import positive

SECTIONS: dict[str, ModuleType] = {
    "step": step,
    "save": save,
    "load": load,
    "evaluation": evaluation,
    "clipping": clipping,
    "scalars": scalars,
    "samples": samples,
    "ranks": ranks,
    "start": start,
    "resume": resume,
    "gpu": gpu,
}
"""Each module has ``ROUNDS``, and ``measure(rounds, scratch, quick)``, which returns comparisons."""

PACKAGES = ("torch", "pytorch-ignite", "lightning", "mmengine", "fvcore")


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmark.py",
        usage="%(prog)s [SECTION ...] [options]",  # one line: it is printed before every error
        description="Measure what trainkit costs, beside code by hand that does the same work.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "sections",
        metavar="SECTION",
        nargs="*",
        type=_section,
        help=f"some of {', '.join(SECTIONS)}; default: all",
    )
    parser.add_argument(
        "--rounds", type=positive, help="this many rounds instead of each section's own number"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round, to see whether everything runs"
    )
    parser.add_argument(
        "--scratch", metavar="FOLDER", help="a folder on the disk on which saves are measured"
    )
    return parser.parse_args(args)


def _section(name: str) -> str:
    if name not in SECTIONS:
        raise argparse.ArgumentTypeError(
            f"there is no section {name!r}; there are {', '.join(SECTIONS)}"
        )
    return name


def describe_run() -> str:
    """When, on what machine, and with what versions the tables are measured."""
    today = datetime.date.today().isoformat()
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    machine = f"{_cpu()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {_gpu()}"
    system = f"{platform.system()}, {platform.machine()}"
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        version = _version(package)
        if version:
            versions.append(f"{package} {version}")
    return f"Measured on {today}: {machine}; {system}. {', '.join(versions)}. One thread."


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.processor()


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    return f"{torch.cuda.get_device_name()} with CUDA {torch.version.cuda}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def measure(args: argparse.Namespace) -> Iterator[str]:
    """The parts of the page."""
    yield describe_run()
    for name in args.sections or SECTIONS:
        print(f"measuring {name}", file=sys.stderr)
        section = SECTIONS[name]
        rounds = args.rounds
        if rounds is None:
            rounds = 1 if args.quick else section.ROUNDS
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            comparisons = section.measure(rounds, Path(scratch), args.quick)
        yield f"## {name}"
        yield str(section.__doc__).strip()
        yield as_table(comparisons) if comparisons else "Not measured: there was no GPU."


def main(args: argparse.Namespace) -> None:
    for part in measure(args):
        print(part, end="\n\n", flush=True)


if __name__ == "__main__":
    main(parse_args())
