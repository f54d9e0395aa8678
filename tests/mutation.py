#!/usr/bin/env python
"""Measure how many faults the tests notice: change one place of trainkit/ at a time, and run the tests of its module.

::

    python tests/mutation.py mutants.json                            # 400 mutants; hours
    python tests/mutation.py mutants.json --number 40 --folder data  # a sample of one folder

A mutant has another operator or constant, the other branch of an ``if``, or a call less. The seed chooses each of them
by its text, so a change of the source changes few others. They are made in a copy of the tree; a record that exists is
continued, and with ``--again`` those that have survived are judged again. The table has the mutants of each folder, and
how many are killed: a test fails, or the tests take five times as long as without the mutant. Several processes share
the work with ``--part 0/2`` and ``--part 1/2`` and a record each; given all records and ``--number 0``, the program
prints their table.

A mutant meets the fast tests of its module, then of its folder, then of the core. If it survives these, it meets the
slow tests of its folder and of whole runs, and if its module has code for accelerators, those on the fake device.
"""

import argparse
import ast
import contextlib
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed.checkpoint  # what takes long to import is imported once, and each run of tests is a fork

ROOT = Path(__file__).resolve().parents[1]
FAKE_DEVICE = (
    "tests/fake_cuda/test_run.py::test_the_acceptance_run_has_no_false_row_and_skips_no_test"
)
FOLDERS = (
    "checkpoint",
    "clients",
    "config",
    "data",
    "engine",
    "evaluation",
    "exactness",
    "solver",
    "testing",
    "utils",
)
CORE = [*(f"tests/{folder}/**/test_*.py" for folder in FOLDERS), "tests/test_modeling.py"]
WHOLE_RUNS = ("tests/exactness/", "tests/engine/")
IS_SLOW = re.compile(r"mark\.slow|\bSLOW\b")
# of the copy
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "output", "build")
OTHER: dict[type, type] = {
    **{
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
    },
    **{
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
        ast.And: ast.Or,
        ast.Or: ast.And,
    },
    **{
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.FloorDiv,
        ast.FloorDiv: ast.Mult,
        ast.Div: ast.Mult,
    },
}


def changes(node: ast.AST) -> Iterator[tuple[Any, ast.AST]]:
    """Pairs (part of the source, what may replace it)."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            yield node, ast.Compare(node.left, [OTHER[type(op)]()], node.comparators)
        case ast.BoolOp():
            yield node, ast.BoolOp(OTHER[type(node.op)](), node.values)
        case ast.BinOp() if type(node.op) in OTHER:
            yield node, ast.BinOp(node.left, OTHER[type(node.op)](), node.right)
        case ast.Constant(value=bool() as value):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, ast.Constant(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) if ast.unparse(test) != "TYPE_CHECKING":
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Expr(value=ast.Call() as call):
            yield call, ast.Constant(None)


def mutants(folder: str) -> Iterator[dict[str, Any]]:
    """Of every possible mutant in the order of the source: its place, and a name that other changes leave to it."""
    for path in sorted((ROOT / "trainkit" / folder).rglob("*.py")):
        source, file, found = (
            path.read_text(),
            path.relative_to(ROOT).as_posix(),
            Counter[tuple[str | None, str]](),
        )
        for node in ast.walk(ast.parse(source)):
            for part, other in changes(node):
                before, after = (
                    ast.get_source_segment(source, part),
                    ast.unparse(ast.fix_missing_locations(other)),
                )
                place = [part.lineno, part.col_offset, part.end_lineno, part.end_col_offset]
                found[before, after] += 1
                name = f"{file}: {before} -> {after}, {found[before, after]}"
                yield {
                    "name": name,
                    "file": file,
                    "place": place,
                    "before": before,
                    "after": f"({after})",
                }


def chosen(folder: str, number: int, seed: int) -> list[dict[str, Any]]:
    return sorted(
        mutants(folder), key=lambda mutant: random.Random(f"{seed} {mutant['name']}").random()
    )[:number]


def runs_for(file: str) -> list[tuple[str, ...]]:
    """Arguments of pytest: its own tests, those of its folder, of the rest of the core; each file with slow ones."""
    tests = [
        path.relative_to(ROOT).as_posix() for pattern in CORE for path in sorted(ROOT.glob(pattern))
    ]
    folder = f"tests/{Path(file).parts[1]}/"
    beside = [test for test in tests if test.startswith(folder)]
    own = [test for test in beside if test.endswith(f"/test_{Path(file).stem}.py")]
    slow = [
        test
        for test in tests
        if test.startswith((folder, *WHOLE_RUNS)) and IS_SLOW.search((ROOT / test).read_text())
    ]
    slow += (
        [FAKE_DEVICE] if re.search("accelerator|cuda|runs_ahead", (ROOT / file).read_text()) else []
    )
    others = [test for test in tests if test not in beside]
    return [
        tuple(run) for run in (own, beside, others, *(["-m", "slow", test] for test in slow)) if run
    ]


def run_pytest(copy: Path, tests: tuple[str, ...]) -> None:
    os.setsid()
    os.chdir(copy)
    os.environ["PYTHONPATH"] = f"{copy}:{copy / 'projects'}"
    sys.path[:] = [
        str(copy),
        *(path for path in sys.path if not Path(path).resolve().is_relative_to(ROOT)),
    ]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "trainkit")]:
        del sys.modules[name]
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    os._exit(int(pytest.main(["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *tests])))


def is_killed(copy: Path, tests: tuple[str, ...], limit_sec: float = 600.0) -> bool:
    end = time.monotonic() + limit_sec
    if (pid := os.fork()) == 0:  # a Process of multiprocessing would be one of a run of several
        run_pytest(copy, tests)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # all that a test has started
    if not ended[0]:
        os.waitpid(pid, 0)
    return ended != (pid, 0)


def mutated(source: bytes, mutant: dict[str, Any]) -> bytes:
    line, column, end_line, end_column = mutant["place"]  # columns count bytes
    lines = source.splitlines(keepends=True)
    changed = [lines[line - 1][:column], mutant["after"].encode(), lines[end_line - 1][end_column:]]
    return b"".join([*lines[: line - 1], *changed, *lines[end_line:]])


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "records",
        type=Path,
        nargs="+",
        help="JSON files; the first is written, all are in the table",
    )
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="", help="of trainkit/, such as data")
    parser.add_argument(
        "--again", action="store_true", help="judge the survivors of the first record again"
    )
    parser.add_argument(
        "--part", default="0/1", help="of the mutants, such as 1/2 for every second one"
    )
    return parser.parse_args(arguments)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    record, *others = [
        json.loads(path.read_text()) if path.exists() else [] for path in args.records
    ]
    present = {mutant["name"] for mutant in mutants("")}
    record = [
        mutant
        for mutant in record
        if mutant["name"] in present and (mutant["killed"] or not args.again)
    ]
    known = {mutant["name"] for mutant in record}
    part, num_parts = map(int, args.part.split("/"))
    # times of the file: Python takes the bytecode of another mutant otherwise
    stamps = itertools.count(1)

    with tempfile.TemporaryDirectory() as folder:
        plain, copy = (
            Path(shutil.copytree(ROOT, Path(folder, name), ignore=LEFT_OUT))
            for name in ("plain", "copy")
        )

        @functools.cache
        def limit_sec(tests: tuple[str, ...]) -> float:
            """Five times as long as without a mutant, and 20 s; 0: they fail without one, and are left out."""
            start = time.monotonic()
            if not is_killed(plain, tests):
                return 20 + 5 * (time.monotonic() - start)
            print(f"left out, since they fail without a mutant: {' '.join(tests)}", flush=True)
            return 0

        for mutant in chosen(args.folder, args.number, args.seed)[part::num_parts]:
            if mutant["name"] in known:
                continue
            file, runs = copy / mutant["file"], runs_for(mutant["file"])
            source = file.read_bytes()
            file.write_bytes(mutated(source, mutant))
            os.utime(file, (stamp := next(stamps), stamp))
            failing = (
                tests
                for tests in runs
                if (limit := limit_sec(tests)) and is_killed(copy, tests, limit)
            )
            mutant["killed_by"] = next(failing, ())
            mutant["killed"] = mutant["killed_by"] != ()
            file.write_bytes(source)
            record.append(mutant)
            args.records[0].write_text(json.dumps(record, indent=1))
            state, place = (
                "killed" if mutant["killed"] else "SURVIVED",
                f"{mutant['file']}:{mutant['place'][0]}",
            )
            print(f"{state} {place}: {mutant['before']} -> {mutant['after']}", flush=True)
    killed = defaultdict(list)
    for mutant in itertools.chain(record, *others):
        for folder in ("/".join(mutant["file"].split("/")[1:-1]) or ".", "trainkit"):
            killed[folder].append(mutant["killed"])
    for folder, found in sorted(killed.items()):
        print(f"| {folder} | {len(found)} | {sum(found)} | {100 * sum(found) / len(found):.0f} % |")


if __name__ == "__main__":
    main(parse_args())
