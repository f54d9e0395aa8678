#!/usr/bin/env python
"""Show the content of a checkpoint, whether it is intact, and where it differs from another one.

::

    python tools/inspect_checkpoint.py output/digits                        # the checkpoints of a folder
    python tools/inspect_checkpoint.py output/digits/model_best.pth         # its entries; --all: its tensors too
    python tools/inspect_checkpoint.py A/model_final.pth B/model_final.pth  # where two differ, bit by bit
    python tools/inspect_checkpoint.py A B                                  # the same of two runs, with their metrics

The tool writes nothing, and runs no code from a file. The exit code is 0; 1 if two files or folders differ, or if a
checkpoint of a folder is broken; 2 if a file cannot be read.
"""

import argparse
import itertools
import os
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from zipfile import is_zipfile

from tabulate import tabulate
from torch import Tensor

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.differences import (
    METRICS_FILE,
    differing_checkpoints,
    differing_files,
    differing_metrics,
    files_in,
)
from trainkit.checkpoint.file import SUFFIX, read_file
from trainkit.checkpoint.folder import candidates, checkpoint_files, choose, read_finished
from trainkit.checkpoint.format import format_of, part_folders
from trainkit.engine import user_errors_exit
from trainkit.utils.logger import printable

FACTS = ["checkpoint", "iterations", "MiB", "state"]
# the entries of these belong to different objects
CONTAINERS = ("trainer", "trainer/hooks", "trainer/_trainer")
MAX_DIFFERENCES = 20  # shown without --all
MAX_WIDTH = 70  # characters of a value


def describe_file(path: str, show_all: bool = False) -> str:
    """The entries of a checkpoint; with ``show_all`` also its tensors.

    Raises:
        CheckpointError: the file is missing, broken or refused.
    """
    state = read_verified(path)
    texts = [tabulate([facts_of(path, state)], FACTS, disable_numparse=True)]
    rows = []
    for name, value in entries_of(state).items():
        tensors = [tensor for _, tensor in named_tensors(value)]
        num_values = sum(tensor.numel() for tensor in tensors)
        rows.append([name, f"{num_values:,}" if tensors else "", _summary(value)])
    texts.append(tabulate(rows, ["entry", "values of tensors", "content"], disable_numparse=True))
    if show_all:
        table = [(name, _short(tensor)) for name, tensor in named_tensors(state)]
        texts.append(tabulate(table, ["tensor", "type and shape"]))
    return "\n\n".join(texts)


def read_verified(path: str) -> dict[str, Any]:
    """The state; tensors in further files are verified too, but have no content."""
    state = read_file(path)
    return format_of(state).fill(state, path, wanted=())


def facts_of(path: str, state: Mapping[str, Any]) -> list[str]:
    """The values of `FACTS` for a file that was read."""
    iteration = state.get("iteration")
    iterations = str(iteration + 1) if isinstance(iteration, int) else ""
    files = [path]
    for folder in part_folders(path):
        files += [entry.path for entry in os.scandir(folder)]
    mib = sum(os.path.getsize(file) for file in files) / 2**20
    verdict = "intact" if is_zipfile(path) else "loads, no checksums"
    return [os.path.basename(path), iterations, f"{mib:,.3f}", verdict]


def entries_of(state: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Path -> value of the entries; those of a container are listed one by one."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        here = f"{path}/{key}".lstrip("/")
        if here in CONTAINERS and isinstance(value, Mapping):
            found.update(entries_of(value, here))
        else:
            found[here] = value
    return found


def named_tensors(
    value: Any, name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Path and value of each tensor in nested mappings, lists and tuples.

    A container that is in many places is read at the first one.
    """
    if seen is None:
        seen = set()
    if isinstance(value, Tensor):
        yield name.lstrip("/"), value
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from named_tensors(item, f"{name}/{key}", seen)


def _summary(value: Any) -> str:
    """An entry on one line."""
    if isinstance(value, Mapping):
        text = ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    else:
        text = _short(value)
    return textwrap.shorten(text, MAX_WIDTH, placeholder=" ...")


def _short(value: Any) -> str:
    """A value; of nested ones only their number."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}"
    if isinstance(value, Mapping | list | tuple) and value:
        return f"({len(value)} entries)"
    return str(value)


def describe_folder(folder: str) -> tuple[str, bool]:
    """A table of a folder's checkpoints, with the one to resume from; and whether something is broken.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    paths = checkpoint_files(folder)
    if not paths:
        raise CheckpointError(
            f"there is no checkpoint in '{folder}': no file is called *.pth; name a run, or its CHECKPOINT.DIR"
        )
    rows = []
    errors = []
    for path in paths:
        try:
            rows.append(facts_of(path, read_verified(path)))
        except OSError as error:  # a CheckpointError is an OSError
            errors.append(str(error))
            rows.append([os.path.basename(path), "", "", "BROKEN"])
    try:
        end = _describe_resume(folder)
    except CheckpointError as error:
        end = f"--resume ends with an error: {error}"
        errors.append(end)
    table = tabulate(rows, FACTS, disable_numparse=True)
    return "\n".join([table, *errors, end]), bool(errors)


def _describe_resume(folder: str) -> str:
    finished = read_finished(folder)
    if isinstance(finished, dict):
        return f"The run has finished after {finished.get('iterations')} iterations."
    path, _ = choose(candidates(folder), read_verified)
    if not path:
        return "--resume finds no checkpoint."
    return f"--resume continues from {os.path.basename(path)}."


def compare(left: str, right: str, show_all: bool = False) -> tuple[str, bool]:
    """A text that says where two checkpoints or two runs differ, and whether they differ.

    Clock readings are left out.

    Raises:
        CheckpointError: a file is missing, broken or refused; there is nothing to compare.
    """
    if os.path.isdir(left) != os.path.isdir(right):
        raise CheckpointError(
            f"one of '{left}' and '{right}' is a folder; name two files or two folders"
        )
    found: Iterable[str]
    if os.path.isdir(left):
        num_checkpoints = len(files_in(left, SUFFIX))
        num_metrics = len(files_in(left, METRICS_FILE))
        if not num_checkpoints and not num_metrics:
            raise CheckpointError(f"there is no checkpoint and no {METRICS_FILE} in '{left}'")
        what = f"{num_checkpoints} checkpoints and {num_metrics} {METRICS_FILE}"
        found = itertools.chain(differing_metrics(left, right), differing_checkpoints(left, right))
    else:
        what = "2 checkpoints"
        found = differing_files(left, right)

    lines = list(found)
    total = len(lines)
    if not total:
        return f"identical: {what}, bit by bit, except clock readings", False
    if total > MAX_DIFFERENCES and not show_all:
        lines[MAX_DIFFERENCES:] = [f"{total - MAX_DIFFERENCES} more differences, which --all shows"]
    lines.append(f"different in {total} places")
    return "\n".join(lines), True


def main(args: argparse.Namespace) -> int:
    """Run, and return the exit code."""
    is_bad = False
    with user_errors_exit():
        try:
            if args.other:
                text, is_bad = compare(args.path, args.other, args.all)
            elif os.path.isdir(args.path):
                text, is_bad = describe_folder(args.path)
            else:
                text = describe_file(args.path, args.all)
        except RuntimeError as error:  # of a tensor larger than the memory, or of deep nesting
            raise CheckpointError(f"the files cannot be read: {error}") from error
        print(printable(text))
    return int(is_bad)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or the folder of a run")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="another one to compare it with")
    parser.add_argument(
        "--all", action="store_true", help="show the tensors of a file, or every difference"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(main(parse_args()))
