#!/usr/bin/env python
"""Measure how many faults the tests notice: change one place of trainkit/ at a time, and run the tests of its module.

::

    python tests/mutation.py mutants.json                            # 400 mutants; hours
    python tests/mutation.py mutants.json --number 40 --folder data  # a sample of one folder

A mutant has another operator or constant, the other branch of an ``if``, or a call less. Which mutants there are
depends on the seed and the source. They are made in a copy of the tree; a record that exists is continued. The table
has the mutants of each folder, and how many are killed: a test fails, or the tests take longer than five minutes.
"""

import argparse
import ast
import functools
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "output", "build")  # of the copy
OTHER: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult},
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
    """File, place, and the text before and after, of every possible mutant in the order of the source."""
    for path in sorted((ROOT / "trainkit" / folder).rglob("*.py")):
        source, file = path.read_text(), path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(source)):
            for part, other in changes(node):
                before, after = ast.get_source_segment(source, part), ast.unparse(ast.fix_missing_locations(other))
                place = [part.lineno, part.col_offset, part.end_lineno, part.end_col_offset]
                yield {"file": file, "place": place, "before": before, "after": f"({after})"}


def files_testing(file: str) -> list[tuple[str, ...]]:
    """The test file of a module, and all files beside it that name the module or one of its classes and functions."""
    path = ROOT / file
    folder = ROOT / "tests" / path.parent.relative_to(ROOT / "trainkit")
    while not (beside := sorted(folder.glob("test_*.py"))):
        folder = folder.parent
    tree = ast.parse(path.read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)] + [path.stem]
    naming = [test for test in beside if any(name in test.read_text() for name in names)] or beside
    own = [test for test in beside if test.name == f"test_{path.stem}.py"]
    return [tuple(test.relative_to(ROOT).as_posix() for test in tests) for tests in (own, naming) if tests]


def is_killed(copy: Path, tests: tuple[str, ...]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(command, cwd=copy, capture_output=True, timeout=300).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def mutated(source: bytes, mutant: dict[str, Any]) -> bytes:
    line, column, end_line, end_column = mutant["place"]  # columns count bytes
    lines = source.splitlines(keepends=True)
    changed = [lines[line - 1][:column], mutant["after"].encode(), lines[end_line - 1][end_column:]]
    return b"".join([*lines[: line - 1], *changed, *lines[end_line:]])


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="JSON file; mutants that it has are not tried again")
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="", help="of trainkit/, such as data")
    return parser.parse_args(arguments)


def main(args: argparse.Namespace) -> None:
    record = json.loads(args.record.read_text()) if args.record.exists() else []
    known = [(mutant["file"], mutant["place"]) for mutant in record]
    fails = functools.cache(is_killed)  # without a mutant
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder, "copy"), ignore=LEFT_OUT))
        for mutant in random.Random(args.seed).sample([*mutants(args.folder)], args.number):
            file, groups = copy / mutant["file"], files_testing(mutant["file"])
            if (mutant["file"], mutant["place"]) in known:
                continue
            if any(fails(copy, tests) for tests in groups):
                print(f"{mutant['file']} is left out: its tests fail without a mutant, {groups}", flush=True)
                continue
            source = file.read_bytes()
            file.write_bytes(mutated(source, mutant))
            mutant["killed"] = any(is_killed(copy, tests) for tests in groups)
            file.write_bytes(source)
            record.append(mutant)
            args.record.write_text(json.dumps(record, indent=1))
            state, place = "killed" if mutant["killed"] else "SURVIVED", f"{mutant['file']}:{mutant['place'][0]}"
            print(f"{state} {place}: {mutant['before']} -> {mutant['after']}", flush=True)
    killed = defaultdict(list)
    for mutant in record:
        for folder in ("/".join(mutant["file"].split("/")[1:-1]) or ".", "trainkit"):
            killed[folder].append(mutant["killed"])
    for folder, found in sorted(killed.items()):
        print(f"| {folder} | {len(found)} | {sum(found)} | {100 * sum(found) / len(found):.0f} % |")


if __name__ == "__main__":
    main(parse_args())
