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
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from zipfile import is_zipfile

from tabulate import tabulate
from torch import Tensor

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.differences import (
    METRICS_FILE,
    differing,
    differing_checkpoints,
    differing_metrics,
    files_in,
    is_of_the_clock,
    metrics_in,
)
from trainkit.checkpoint.file import SUFFIX, read_file
from trainkit.checkpoint.folder import (
    candidates,
    checkpoint_files,
    choose,
    read_finished,
    tagged_file,
)
from trainkit.checkpoint.format import format_of, make_format, part_folders
from trainkit.engine import user_errors_exit
from trainkit.utils.file_io import refuse_pipe
from trainkit.utils.logger import printable
from trainkit.utils.periods import say_done

# the entries of these belong to different objects
CONTAINERS = ("trainer", "trainer/hooks", "trainer/_trainer")
MAX_DIFFERENCES = 10  # differences shown of each part of the state without --all
MAX_WIDTH = 70  # characters of a value
_MAGIC = b"PK", b"\x80"  # the first bytes of an archive and of a pickle


# ---------------------------------------------------------------------------- one file


def describe_file(path: str, show_all: bool = False) -> str:
    """What a file is, and its entries; with ``show_all`` also the tensors of its model.

    Raises:
        CheckpointError: the file is missing, broken or refused.
    """
    state = _read_shapes(path)
    texts = [tabulate(_facts(path, state), tablefmt="plain", disable_numparse=True)]
    for name in ("model", "state_dict"):
        if show_all and isinstance(state.get(name), Mapping):
            texts.append(_table_of_tensors(name, state[name]))
    rows = []
    for part, value in entries_of(state).items():
        rows.append((part, _size(value), _summary(value)))
    texts.append(tabulate(rows, ["entry", "tensors", "values"], disable_numparse=True))
    return "\n\n".join(texts)


def _facts(path: str, state: Mapping[str, Any]) -> list[tuple[str, str]]:
    intact = "yes, its content matches its checksums"
    facts = [
        ("file", f"{path}, {_bytes(os.path.getsize(path))}"),
        ("intact", intact if is_zipfile(path) else "it loads; no checksums"),
    ]
    for folder in part_folders(path):
        sizes = [entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()]
        facts.append(("in parts", f"{os.path.basename(folder)}, {_bytes(sum(sizes))}"))
    iteration = state.get("iteration")
    if isinstance(iteration, int):
        facts.append(
            ("iteration", f"{say_done(iteration + 1)} (number {iteration}, counted from 0)")
        )
    if "best_value" in state:
        best = f"{state.get('best_of')} {state['best_value']} ({state.get('best_mode')})"
        if "evaluated" in state:  # by a hook that evaluates other weights
            best += f", of the weights {state['evaluated']!r}"
        facts.append(("best", best))
    model = state.get("model", state.get("state_dict"))
    tensors = list(tensors_in(model))
    if tensors:
        num_values = sum(tensor.numel() for tensor in tensors)
        facts.append(("model", f"{num_values:,} values in {len(tensors)} tensors, {_size(model)}"))
    # missing in a file of another program
    with contextlib.suppress(LookupError, TypeError):
        origin = state["trainer"]["origin"]
        program = f"-m {origin['module']}" if origin["module"] else origin["argv"][0]
        facts.append(("command", " ".join([program, *origin["argv"][1:]])))
    return facts


def _read_shapes(path: str) -> dict[str, Any]:
    """The verified state; its tensors have no content, because this may be larger than the memory."""
    try:
        state = _read(path, map_location="meta")
    except CheckpointError:  # this device has no quantized tensors; any other error is raised again
        state = _read(path)
    return _normalized(format_of(state).fill(state, path, wanted=()))


def read_whole(path: str) -> dict[str, Any]:
    """The verified state with its content."""
    state = _read(path)
    return _normalized(format_of(state).fill(state, path))


def _read(path: str, map_location: str = "cpu") -> dict[str, Any]:
    if path.endswith(".safetensors"):
        return dict(make_format("safetensors").read(path))
    begin = b""
    with contextlib.suppress(OSError):  # read_file says what fails
        refuse_pipe(path)
        with open(path, "rb") as file:
            begin = file.read(2)
    if begin and not begin.startswith(_MAGIC):
        raise CheckpointError(
            f"'{path}' is not a checkpoint; name a file that torch.save wrote, such as *.pth"
        )
    return read_file(path, map_location)


def _normalized(state: dict[str, Any]) -> dict[str, Any]:
    is_bare = bool(state) and all(isinstance(value, Tensor) for value in state.values())
    return {"model": state} if is_bare else state


def _table_of_tensors(name: str, tensors: Mapping[str, Any]) -> str:
    rows = []
    for key, value in tensors.items():
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            rows.append((key, str(list(value.shape)), dtype, _size(value)))
        else:
            rows.append((key, "", type(value).__name__, _summary(value)))
    return tabulate(rows, [name, "shape", "dtype", "size"], disable_numparse=True)


def entries_of(state: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Path -> value of all entries of a checkpoint; the entries of a container are listed one by one."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        here = f"{path}/{key}".lstrip("/")
        if here in CONTAINERS and isinstance(value, Mapping):
            found.update(entries_of(value, here))
        else:
            found[here] = value
    return found


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested mappings, lists and tuples; one of these that is in many places counts once."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += reversed([*value.values()] if isinstance(value, Mapping) else value)


def _summary(value: Any) -> str:
    """An entry on one line."""
    if isinstance(value, Mapping):
        is_of_tensors = len(value) > 3 and all(isinstance(item, Tensor) for item in value.values())
        items = [f"{key} {_short(item)}" for key, item in value.items()]
        text = f"{len(value)} tensors" if is_of_tensors else ", ".join(items)
    else:
        text = _short(value)
    text = " ".join(text.split())
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 4] + " ..."


def _short(value: Any) -> str:
    """A value; of nested ones only their number."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping | list | tuple):
        return f"({len(value)} entries)" if value else repr(value)
    return value if isinstance(value, str) else repr(value)


def _size(value: Any) -> str:
    # not nbytes, which sparse tensors do not have
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
    return _bytes(num_bytes) if num_bytes else ""


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


# ---------------------------------------------------------------------------- a folder


def describe_folder(folder: str) -> tuple[str, bool]:
    """A table of a folder's checkpoints, with the one from which a run would continue; and whether one is broken.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    paths = checkpoint_files(folder)
    if not paths:
        raise CheckpointError(
            f"there is no checkpoint in '{folder}': no file is called *.pth; name a run, or its CHECKPOINT.DIR"
        )
    rows = []
    broken: dict[str, str] = {}
    for path in paths:
        iterations = written = size = ""
        state = "intact" if is_zipfile(path) else "loads, no checksums"
        try:
            facts = os.stat(path)
            size = _bytes(facts.st_size)
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.st_mtime))
            iteration = _read_shapes(path).get("iteration")
            iterations = str(iteration + 1) if isinstance(iteration, int) else ""
        except OSError as error:  # a CheckpointError is an OSError
            broken[path] = str(error)
            state = "BROKEN"
        rows.append([os.path.basename(path), iterations, size, written, state])
    titles = ["checkpoint", "iterations", "size", "written", "state"]
    end, is_wrong = _describe_resume(folder, broken)
    lines = [tabulate(rows, titles, disable_numparse=True), *broken.values(), end]
    return "\n".join(lines), bool(broken) or is_wrong


def _describe_resume(folder: str, broken: Mapping[str, str]) -> tuple[str, bool]:
    """From which file a run goes on, and whether last_checkpoint names one that is not there."""
    finished = read_finished(folder)
    if isinstance(finished, dict):
        return f"The run has finished after {finished.get('iterations')} iterations.", False

    def read(path: str) -> None:
        if path in broken:
            raise CheckpointError(broken[path])
        _read_shapes(path)

    try:
        tagged = tagged_file(folder or os.curdir)
        if tagged and not os.path.exists(tagged):
            return f"'{tagged}', which last_checkpoint names, is not there", True
        path, _ = choose(candidates(folder), read)
    except CheckpointError as error:
        return f"--resume ends with an error: {error}", True
    if not path:
        return "--resume finds no checkpoint.", False
    return f"--resume continues from {os.path.basename(path)}.", False


# ---------------------------------------------------------------------------- two files or folders


def compare_files(left: str, right: str, show_all: bool = False) -> tuple[str, bool]:
    """A text that says where two files differ, and whether they differ.

    Args:
        show_all: also show clock readings, and more than `MAX_DIFFERENCES` differences of a part of the state.

    Raises:
        CheckpointError: a file is missing, broken or refused.
    """
    mine = read_whole(left)
    other = read_whole(right)

    def is_left_out(key: Any, path: str) -> bool:
        return not show_all and is_of_the_clock(path)

    num_entries = len(entries_of(mine).keys() | entries_of(other).keys())
    same = f"identical: {num_entries} entries, bit by bit"
    if not show_all:
        same += ", except clock readings"
    return _report(differing(mine, other, skip=is_left_out), same, show_all)


def compare_folders(left: str, right: str, show_all: bool = False) -> tuple[str, bool]:
    """The same of the checkpoints and the metrics of two runs, without clock readings."""
    files = files_in(left, SUFFIX)
    metrics = files_in(left, METRICS_FILE)
    if not files and not metrics:
        raise CheckpointError(f"there is no checkpoint and no {METRICS_FILE} in '{left}'")
    num_lines = sum(len(metrics_in(os.path.join(left, name))) for name in metrics)
    same = f"identical: {len(files)} checkpoints, and {num_lines} lines of metrics"
    found = itertools.chain(differing_metrics(left, right), differing_checkpoints(left, right))
    return _report(found, f"{same}, bit by bit, except clock readings", show_all)


def _entry_of(line: str) -> str:
    """The entry of a checkpoint to which a difference belongs; the whole line if it is an entry itself."""
    names = line.split("/")
    if not names[0].endswith("trainer"):
        depth = 1
    elif names[1] in ("hooks", "_trainer"):
        depth = 3
    else:
        depth = 2
    return "/".join(names[:depth])


def _report(differences: Iterable[str], same: str, show_all: bool) -> tuple[str, bool]:
    by_part: dict[str, list[str]] = {}
    try:
        for line in differences:
            by_part.setdefault(_entry_of(line), []).append(line)
    except RuntimeError as error:  # such as a tensor that is larger than the memory
        raise CheckpointError(f"the files cannot be compared: {error}") from error
    lines = []
    total = 0
    for part, found in by_part.items():
        total += len(found)
        lines += found if show_all else found[:MAX_DIFFERENCES]
        if not show_all and len(found) > MAX_DIFFERENCES:
            lines.append(
                f"{part}: {len(found) - MAX_DIFFERENCES} more differences, which --all shows"
            )
    lines.append(f"different in {total} places" if total else same)
    return "\n".join(lines), total > 0


# ---------------------------------------------------------------------------- the command line


def main(args: argparse.Namespace) -> int:
    """Run, and return the exit code."""
    with user_errors_exit():
        if args.other:
            compare = compare_folders if os.path.isdir(args.path) else compare_files
            if os.path.isdir(args.path) != os.path.isdir(args.other):
                raise CheckpointError(
                    f"one of '{args.path}' and '{args.other}' is a folder; name two files or two folders"
                )
            text, is_bad = compare(args.path, args.other, args.all)
        elif os.path.isdir(args.path):
            text, is_bad = describe_folder(args.path)
        else:
            text, is_bad = describe_file(args.path, args.all), False
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
