#!/usr/bin/env python
"""Show the content of a checkpoint, whether it is intact, and where it differs from another one.

::

    python tools/inspect_checkpoint.py output/digits                        # the checkpoints of a folder
    python tools/inspect_checkpoint.py output/digits/model_best.pth         # what one is; --all shows every entry
    python tools/inspect_checkpoint.py A/model_final.pth B/model_final.pth  # where two differ, bit by bit

The tool writes nothing, and runs no code from a file. The exit code is 0; 1 if two files differ, or if a checkpoint of
a folder is broken; 2 if a file cannot be read.
"""

import argparse
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from zipfile import is_zipfile

from tabulate import tabulate
from torch import Tensor
from trainkit.projects.replay.fork import describe_parent
from trainkit.projects.replay.origin import settings_of

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.differences import differing, is_of_the_clock
from trainkit.checkpoint.file import read_file
from trainkit.checkpoint.folder import (
    candidates,
    checkpoint_files,
    choose,
    read_finished,
    tagged_file,
)
from trainkit.checkpoint.format import format_of, make_format
from trainkit.config import get_cfg
from trainkit.engine import user_errors_exit
from trainkit.evaluation.testing import flatten_results_dict
from trainkit.utils.file_io import refuse_pipe
from trainkit.utils.logger import printable
from trainkit.utils.periods import say_done
from trainkit.utils.plugins import find_plugins

# the entries of these belong to different objects
CONTAINERS = (
    "trainer",
    "trainer/hooks",
    "trainer/_trainer",
)
MAX_DIFFERENCES = 10  # differences shown in each part of the state without --all
MAX_WIDTH = 70  # characters of a value
MAX_RESULTS = 8  # results shown of the newest evaluation
_DETAILS = ("processes", "versions", "code")  # facts that only --all shows
_MAGIC = b"PK", b"\x80"  # the first bytes of an archive and of a pickle


# ---------------------------------------------------------------------------- one file


def describe_file(path: str, show_all: bool = False) -> str:
    """The description of one file.

    Args:
        show_all: also show every tensor and entry, and the exact code with which the run was started.

    Raises:
        CheckpointError: the file is missing, broken or refused.
    """
    state = _read_shapes(path)
    facts = [
        (name, text)
        for name, text in _facts(path, state)
        if text and (show_all or name not in _DETAILS)
    ]
    tables = [tabulate(facts, tablefmt="plain", disable_numparse=True)]
    if not show_all:
        return f"{tables[0]}\n\n--all shows every tensor and entry."
    for name in ("model", "state_dict"):
        if isinstance(state.get(name), Mapping):
            tables.append(_table_of_tensors(name, state[name]))
    rows = [(part, _size(_at(state, part)), _summary(_at(state, part))) for part in parts_of(state)]
    tables.append(tabulate(rows, ["entry", "tensors", "values"], disable_numparse=True))
    return "\n\n".join(tables)


def _read_shapes(path: str) -> dict[str, Any]:
    """The verified state; its tensors have no content, because this may be larger than the memory."""
    try:
        state = _read(path, map_location="meta")
    except CheckpointError:  # this device has no quantized tensors; any other error is raised again
        state = _read(path)
    return _normalized(format_of(state).fill(state, path, wanted=()))


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


def _describe_parts(files: list[str]) -> str:
    folders = sorted({os.path.basename(os.path.dirname(file)) for file in files})
    return f"{', '.join(folders)}, {_bytes(sum(map(os.path.getsize, files)))}" if files else ""


def _normalized(state: dict[str, Any]) -> dict[str, Any]:
    is_bare = bool(state) and all(isinstance(value, Tensor) for value in state.values())
    return {"model": state} if is_bare else state


def _facts(path: str, state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the file says about itself; "" for facts that are missing, damaged, or written by another program."""
    trainer: Any = state.get("trainer")
    origin: Any = trainer.get("origin") if isinstance(trainer, Mapping) else None
    facts: dict[str, Callable[[], str]] = {
        "file": lambda: f"{path}, {_bytes(os.path.getsize(path))}",
        "intact": lambda: (
            "yes, its content matches its checksums"
            if is_zipfile(path)
            else "it loads; no checksums"
        ),
        "iteration": lambda: _describe_iteration(state["iteration"], trainer),
        "continues": lambda: _describe_next(trainer),
        "evaluation": lambda: _describe_results(trainer),
        "best": lambda: _describe_best(trainer),
        "model": lambda: _describe_model(state.get("model", state.get("state_dict"))),
        "settings": lambda: _describe_settings(origin["config"]),
        "processes": lambda: str(trainer["world_size"]),
        "command": lambda: " ".join(
            [
                f"-m {origin['module']}" if origin["module"] else origin["argv"][0],
                *origin["argv"][1:],
            ]
        ),
        "started": lambda: (
            f"in {origin['folder']}, on {origin['facts']['device']}, with the seed {origin['seed']}"
        ),
        "versions": lambda: ", ".join(
            f"{name[len('version of ') :]} {fact}"
            for name, fact in origin["facts"].items()
            if "version of " in name
        ),
        "code": lambda: (
            f"{origin['facts']['commit of the code'] or 'no git repository'}; {len(origin['files'])} files of the "
            "project are known by their digests"
        ),
        "forked from": lambda: "\n".join(map(describe_parent, reversed(origin["parents"]))),
        "left out": lambda: _describe_left_out(trainer["hooks"]["SkipBatches"]["left_out"]),
        "in parts": lambda: _describe_parts(
            [file for name in find_plugins().formats for file in make_format(name).files(path)[:-1]]
        ),
        "is": lambda: _notes(path, _tagged(os.path.dirname(path))[0]),
    }
    found = []
    for name, describe in facts.items():
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            found.append((name, describe()))
    return found


def _describe_iteration(iteration: int, trainer: Any) -> str:
    max_iter = None
    with contextlib.suppress(LookupError, TypeError, ValueError):
        max_iter = int(trainer["end"]["max_iter"])
    return f"{say_done(iteration + 1, max_iter)} (number {iteration}, counted from 0)"


def _describe_next(trainer: Mapping[str, Any]) -> str:
    """With what a run continues from the file."""
    steps = []
    if not trainer["boundary"]["is_over"]:
        steps.append("with the rest of this iteration (evaluation, writers)")
    end = trainer["end"]
    if end["finished_early"]:
        steps.append(f"no further, finished early: {end['finished_early']}")
    elif trainer["iteration"] + 1 >= end["max_iter"]:
        steps.append("with the end of the run")
    else:
        steps.append("with the next iteration")
    return ", then ".join(steps)


def _describe_results(trainer: Mapping[str, Any]) -> str:
    results = flatten_results_dict(trainer["results"])
    shown = [f"{name} {value:.5g}" for name, value in [*results.items()][:MAX_RESULTS]]
    shown += [f"{len(results) - MAX_RESULTS} more"] * (len(results) > MAX_RESULTS)
    done = max(hook.get("evaluated_iters", -1) for hook in trainer["hooks"].values())
    return "\n".join([say_done(done), *shown]) if shown and done >= 0 else "\n".join(shown)


def _describe_best(trainer: Mapping[str, Any]) -> str:
    end = trainer["end"]["max_iter"]
    return "\n".join(
        # in the evaluation at the end best_iter is the length of the run
        f"{hook['metric']} {hook['best']:.5g} {say_done(min(hook['best_iter'] + 1, end))}"
        for name, hook in trainer["hooks"].items()
        if name.startswith("BestCheckpointer") and hook["best"] is not None
    )


def _describe_model(model: Any) -> str:
    tensors = [*tensors_in(model)]
    size = f"{sum(tensor.numel() for tensor in tensors):,} values in {len(tensors)} tensors, {_size(model)}"
    return size if tensors else ""


def _describe_settings(config: str) -> str:
    """The settings that change what is computed and differ from the defaults, one on each line."""
    settings, default = settings_of(config), settings_of(get_cfg().dump())
    # it has its own line
    changed = [key for key in settings if settings[key] != default.get(key) and key != "SEED"]
    return "\n".join(f"{key} {settings[key]!r}" for key in changed)


def _describe_left_out(ranges: Sequence[tuple[int, int]]) -> str:
    text = ", ".join(f"{start} to {end - 1}" for start, end in ranges)
    return f"the batches of iterations {text}" if text else ""


def _table_of_tensors(name: str, tensors: Mapping[str, Any]) -> str:
    rows = [
        (
            key,
            str(list(value.shape)),
            str(value.dtype).removeprefix("torch."),
            _bytes(_num_bytes(value)),
        )
        if isinstance(value, Tensor)
        else (key, "", type(value).__name__, _summary(value))
        for key, value in tensors.items()
    ]
    found = [*tensors_in(tensors)]
    total = (
        f"{len(found)} tensors",
        f"{sum(tensor.numel() for tensor in found):,} values",
        "",
        _size(tensors),
    )
    return tabulate([*rows, total], [name, "shape", "dtype", "size"], disable_numparse=True)


def parts_of(state: Mapping[str, Any], path: str = "") -> list[str]:
    """Paths of all entries of a checkpoint; the entries of a container are listed one by one."""
    parts = []
    for key, value in state.items():
        here = f"{path}/{key}".lstrip("/")
        parts += (
            parts_of(value, here) if here in CONTAINERS and isinstance(value, Mapping) else [here]
        )
    return parts


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


def _at(state: Any, part: str) -> Any:
    """The inverse of `parts_of`; a key may have a slash in it."""
    for key in part.split(
        "/", maxsplit=2 if part.startswith(("trainer/hooks/", "trainer/_trainer/")) else 1
    ):
        state = state[key]
    return state


def _summary(value: Any) -> str:
    """The values that are not tensors, on one line."""
    if isinstance(value, Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    elif (
        isinstance(value, Mapping)
        and len(value) > 3
        and all(isinstance(item, Tensor) for item in value.values())
    ):
        text = f"{len(value)} tensors"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    else:
        text = _short(value)
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 4] + " ..."


def _short(value: Any) -> str:
    """Nested values, or only their number if there are many."""
    if isinstance(value, Tensor):
        return f"tensor {list(value.shape)}"
    if isinstance(value, Mapping | list | tuple):
        items = [*value.values()] if isinstance(value, Mapping) else value
        is_flat = len(items) <= 40 and not any(
            isinstance(item, Mapping | list | tuple | Tensor) for item in items
        )
        return text if is_flat and len(text := repr(value)) <= 40 else f"({len(value)} entries)"
    return repr(value) if not isinstance(value, str) else value


def _size(value: Any) -> str:
    num_bytes = sum(map(_num_bytes, tensors_in(value)))
    return _bytes(num_bytes) if num_bytes else ""


def _num_bytes(tensor: Tensor) -> int:
    # this works for a sparse tensor too, which has no nbytes
    return tensor.numel() * tensor.element_size()


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
    tagged, problem = _tagged(folder)
    rows, broken = [], {}
    for path in paths:
        row = [os.path.basename(path), "", "", "", "", _notes(path, tagged)]
        try:
            row[2] = _bytes(os.stat(path).st_size)
            row[3] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.stat(path).st_mtime))
            state = _read_shapes(path)
            row[1] = str(state["iteration"] + 1) if isinstance(state.get("iteration"), int) else ""
            row[4] = "intact" if is_zipfile(path) else "loads, no checksums"
        except OSError as error:  # a CheckpointError is an OSError
            broken[path], row[4] = str(error), "BROKEN"
        rows.append(row)
    lines = [
        tabulate(
            rows,
            ["checkpoint", "iterations", "size", "written", "state", "is"],
            disable_numparse=True,
        )
    ]
    lines += [*broken.values(), problem or _describe_resume(folder, broken)]
    return "\n".join(lines), bool(broken or problem)


def _tagged(folder: str) -> tuple[str, str]:
    """The path that `last_checkpoint` names, and an error message if this path is wrong."""
    try:
        path = tagged_file(folder or os.curdir)
    except CheckpointError as error:
        return "", str(error)
    return (
        path,
        f"'{path}', which last_checkpoint names, is not there"
        if path and not os.path.exists(path)
        else "",
    )


def _notes(path: str, tagged: str) -> str:
    name = os.path.basename(path)
    is_so = {
        "last": bool(tagged) and os.path.basename(tagged) == name,
        "best": name.startswith("model_best"),
        "final": name == "model_final.pth",
        "published": "_published" in name,
    }
    return ", ".join(note for note, holds in is_so.items() if holds)


def _describe_resume(folder: str, broken: Mapping[str, str]) -> str:
    finished = read_finished(folder)
    if isinstance(finished, dict):
        return f"The run has finished after {finished.get('iterations')} iterations."

    def read(path: str) -> None:
        if path in broken:
            raise CheckpointError(broken[path])
        _read_shapes(path)

    try:
        path, _ = choose(candidates(folder), read)
    except CheckpointError as error:
        return f"--resume ends with an error: {error}"
    return (
        f"--resume continues from {os.path.basename(path)}."
        if path
        else "--resume finds no checkpoint."
    )


# ---------------------------------------------------------------------------- two files


def compare_files(left: str, right: str, show_all: bool = False) -> tuple[str, bool]:
    """A text that says where two files differ, and whether they differ.

    Args:
        show_all: also show clock readings, and more than `MAX_DIFFERENCES` differences in a part of the state.

    Raises:
        CheckpointError: a file is missing, broken, refused, or a folder.
    """
    states = read_whole(left), read_whole(right)
    parts = dict.fromkeys(itertools.chain.from_iterable(map(parts_of, states)))
    by_part: dict[str, list[str]] = {}
    try:
        found = list(
            differing(*states, skip=lambda key, path: not show_all and is_of_the_clock(path))
        )
    except RuntimeError as error:  # such as a tensor that is larger than the memory
        raise CheckpointError(f"'{left}' and '{right}' cannot be compared: {error}") from error
    for line in found:
        path = line.partition(": ")[0]
        part = next((part for part in parts if f"{path}/".startswith(f"{part}/")), path)
        by_part.setdefault(part, []).append(line)
    lines = []
    for part, found in by_part.items():
        shown = found if show_all else found[:MAX_DIFFERENCES]
        lines += shown
        if hidden := len(found) - len(shown):
            lines.append(f"{part}: {hidden} more differences, which --all shows")
    total = sum(map(len, by_part.values()))
    same = f"identical: {len(parts)} entries, bit by bit" + (
        "" if show_all else ", except clock readings"
    )
    lines.append(f"different in {total} places" if total else same)
    return "\n".join(lines), total > 0


def read_whole(path: str) -> dict[str, Any]:
    if os.path.isdir(path):
        raise CheckpointError(f"'{path}' is a folder; name two files to compare")
    state = _read(path)
    return _normalized(format_of(state).fill(state, path))


# ---------------------------------------------------------------------------- the command line


def main(args: argparse.Namespace) -> int:
    """Run, and return the exit code."""
    with user_errors_exit():
        if args.other:
            text, is_bad = compare_files(args.path, args.other, args.all)
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
    parser.add_argument("path", metavar="FILE", help="a checkpoint, or a folder of checkpoints")
    parser.add_argument(
        "other", nargs="?", metavar="OTHER", help="a second checkpoint to compare with the first"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="show every entry of a file, or every difference, also those of clocks",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(main(parse_args()))
