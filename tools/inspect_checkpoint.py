#!/usr/bin/env python
"""Show the content of a checkpoint, whether it is intact, and where it differs from another one.

::

    python tools/inspect_checkpoint.py output/digits                        # the checkpoints of a folder
    python tools/inspect_checkpoint.py output/digits/model_best.pth         # the content of one
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
from collections.abc import Mapping
from typing import Any
from zipfile import is_zipfile

from tabulate import tabulate
from torch import Tensor, nn

from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.contents import differing, is_of_the_clock, parts_of, tensors_in
from trainkit.checkpoint.file import SAFETENSORS_SUFFIX, is_ours, read_file
from trainkit.checkpoint.folder import checkpoint_files, choose_and_read, tagged_file
from trainkit.checkpoint.shards import KEY as SHARDS
from trainkit.checkpoint.shards import fill_shards, verify_shards
from trainkit.engine import user_errors_exit
from trainkit.engine.fork import describe_parent

MAX_DIFFERENCES = 10  # of each part of the state, unless --all
MAX_WIDTH = 70  # of a value
_MAGIC = b"PK", b"\x80"  # the first bytes of an archive and of a pickle


# ---------------------------------------------------------------------------- one file


def describe_file(path: str) -> str:
    """The description of one file.

    Raises:
        CheckpointError: it is missing, broken or refused.
    """
    state = _read_shapes(path)
    tables = [tabulate(_facts(path, state), tablefmt="plain")]
    for name in ("model", "state_dict"):
        if isinstance(state.get(name), Mapping):
            tables.append(_table_of_tensors(name, state[name]))
    rows = [(part, _size(_at(state, part)), _summary(_at(state, part))) for part in parts_of(state)]
    tables.append(tabulate(rows, ["entry", "tensors", "values"], disable_numparse=True))
    return "\n\n".join(tables)


def _read_shapes(path: str) -> dict[str, Any]:
    """The verified state, its tensors without their content, which may be larger than the memory."""
    try:
        state = _read(path, map_location="meta")
    except CheckpointError:  # this device has no quantized tensors; any other error comes again
        state = _read(path)
    verify_shards(state, path)
    return _normalized(state)


def _read(path: str, map_location: str = "cpu") -> dict[str, Any]:
    begin = b""
    with contextlib.suppress(OSError), open(path, "rb") as file:  # read_file says what fails
        begin = file.read(2)
    if begin and not (begin.startswith(_MAGIC) or path.endswith(SAFETENSORS_SUFFIX)):
        raise CheckpointError(f"'{path}' is not a checkpoint; name a file that torch.save wrote, such as *.pth")
    return read_file(path, map_location)


def _normalized(state: dict[str, Any]) -> dict[str, Any]:
    is_bare = bool(state) and all(isinstance(value, Tensor) for value in state.values())
    return {"model": state} if is_bare else state


def _facts(path: str, state: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("file", f"{path}, {_bytes(os.path.getsize(path))}"),
        ("written by", "trainkit" if is_ours(path) else "another program"),
        ("intact", "yes, its content matches its checksums" if is_zipfile(path) else "it loads; it has no checksums"),
    ]
    trainer: Any = state.get("trainer")
    trainer = trainer if isinstance(trainer, Mapping) else {}
    position, iteration = trainer.get("position"), state.get("iteration")
    position = position if isinstance(position, Mapping) else {}
    if isinstance(iteration, int):
        end = f"; {iteration + 1} of {position.get('max_iter')} are done" if position else ""
        facts.append(("iteration", f"{iteration}, counted from 0{end}"))
    if position:
        with contextlib.suppress(LookupError, TypeError):  # of another program, or damaged on purpose
            facts.append(("continues", _describe_position(position, trainer["iteration"])))
    if "world_size" in trainer:
        facts.append(("processes", str(trainer["world_size"])))
    if isinstance(origin := trainer.get("origin"), Mapping) and origin:
        facts += _describe_origin(origin)
    with contextlib.suppress(LookupError, TypeError, ValueError):  # as above
        for parent in reversed(origin.get("parents", []) if isinstance(origin, Mapping) else []):
            facts.append(("forked from", describe_parent(parent)))
    with contextlib.suppress(TypeError, ValueError):
        ranges = ", ".join(f"{start} to {end - 1}" for start, end in trainer.get("left_out", []))
        facts += [("left out", f"the batches of iterations {ranges}")] if ranges else []
    if SHARDS in state:
        files = state[SHARDS]["files"].values()
        facts.append(("shards", f"{state[SHARDS]['folder']}, {_bytes(sum(size for size, _ in files))}"))
    if notes := _notes(path, _tagged(os.path.dirname(path))[0]):
        facts.append(("is", notes))
    return facts


def _describe_origin(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    with contextlib.suppress(LookupError, TypeError, AttributeError):  # as above
        versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
        commit = origin["commit"] or "no git repository"
        code = f"{commit}; {len(origin['files'])} files of the project are known by their digests"
        started = [f"-m {origin['module']}" if origin["module"] else origin["argv"][0], *origin["argv"][1:]]
        where = f"in {origin['folder']}, on {origin['device']}, with the seed {origin['seed']}"
        return [("command", " ".join(started)), ("started", where), ("versions", versions), ("code", code)]
    return []


def _describe_position(position: Mapping[str, Any], iteration: int) -> str:
    steps = [f"with stage 2 of iteration {iteration} (evaluation, writers)"] if position["stage"] == 2 else []
    if position["finished_early"]:
        steps.append(f"no further, finished early: {position['finished_early']}")
    elif iteration + 1 >= position["max_iter"]:
        steps.append("with the end of the run")
    else:
        steps.append(f"with iteration {iteration + 1}")
    return ", then ".join(steps)


def _table_of_tensors(name: str, tensors: Mapping[str, Any]) -> str:
    rows = [
        (key, str(list(value.shape)), str(value.dtype).removeprefix("torch."), _bytes(_num_bytes(value)))
        if isinstance(value, Tensor)
        else (key, "", type(value).__name__, _summary(value))
        for key, value in tensors.items()
    ]
    found = [*tensors_in(tensors)]
    total = (f"{len(found)} tensors", f"{sum(tensor.numel() for tensor in found):,} values", "", _size(tensors))
    return tabulate([*rows, total], [name, "shape", "dtype", "size"], disable_numparse=True)


def _at(state: Any, part: str) -> Any:
    """The inverse of `parts_of`; a key may have a slash in it."""
    for key in part.split("/", maxsplit=2 if part.startswith(("trainer/hooks/", "trainer/_trainer/")) else 1):
        state = state[key]
    return state


def _summary(value: Any) -> str:
    """The values that are not tensors, on one line."""
    if isinstance(value, Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    elif isinstance(value, Mapping) and len(value) > 3 and all(isinstance(item, Tensor) for item in value.values()):
        text = f"{len(value)} tensors"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    else:
        text = _short(value)
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 4] + " ..."


def _short(value: Any) -> str:
    """Nested values as their number, unless there are few of them."""
    if isinstance(value, Tensor):
        return f"tensor {list(value.shape)}"
    if isinstance(value, Mapping | list | tuple) and len(repr(value)) > 40:
        return f"({len(value)} entries)"
    return repr(value) if not isinstance(value, str) else value


def _size(value: Any) -> str:
    num_bytes = sum(map(_num_bytes, tensors_in(value)))
    return _bytes(num_bytes) if num_bytes else ""


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # also of a sparse one, which has no nbytes


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


# ---------------------------------------------------------------------------- a folder


def describe_folder(folder: str) -> tuple[str, bool]:
    """A table of its checkpoints, and the one from which a run would continue; whether one of them is broken.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    paths = checkpoint_files(folder)
    if not paths:
        raise CheckpointError(
            f"there is no checkpoint in '{folder}': no file is called *.pth; name the folder of a run"
        )
    tagged, problem = _tagged(folder)
    rows, broken = [], {}
    for path in paths:
        row = [os.path.basename(path), "", "", "", "", _notes(path, tagged)]
        try:
            row[2] = _bytes(os.stat(path).st_size)
            row[3] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.stat(path).st_mtime))
            state = _read_shapes(path)
            row[1], row[4] = str(state.get("iteration", "")), "intact" if is_zipfile(path) else "loads, no checksums"
        except OSError as error:  # a CheckpointError is one
            broken[path], row[4] = str(error), "BROKEN" if is_ours(path) else "UNREADABLE"
        rows.append(row)
    lines = [tabulate(rows, ["checkpoint", "iteration", "size", "written", "state", "is"], disable_numparse=True)]
    lines += [*broken.values(), problem or _describe_resume(folder, broken)]
    return "\n".join(lines), bool(broken or problem)


def _tagged(folder: str) -> tuple[str, str]:
    """The path that `last_checkpoint` names, and an error message if it is wrong."""
    try:
        path = tagged_file(folder or os.curdir)
    except CheckpointError as error:
        return "", str(error)
    return path, f"'{path}', which last_checkpoint names, is not there" if path and not os.path.exists(path) else ""


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
    finished = Checkpointer(nn.Identity(), folder).finished()
    if finished is not None:
        return f"The run has finished after {finished.get('iterations')} iterations."
    try:
        path, _ = choose_and_read(folder, broken)
    except CheckpointError:
        return "--resume finds no intact checkpoint."
    return f"--resume continues from {os.path.basename(path)}." if path else "--resume finds no checkpoint."


# ---------------------------------------------------------------------------- two files


def _check_are_files(*paths: str) -> None:
    if folders := [path for path in paths if os.path.isdir(path)]:
        raise CheckpointError(f"'{folders[0]}' is a folder; name two files to compare")


def compare_files(left: str, right: str, show_all: bool = False) -> tuple[str, bool]:
    """Where they differ, and whether they do.

    Args:
        show_all: also clock readings, and more than `MAX_DIFFERENCES` differences in a part of the state.

    Raises:
        CheckpointError: a file is missing, broken or refused.
    """
    states = _normalized(_read_whole(left)), _normalized(_read_whole(right))
    parts = dict.fromkeys(itertools.chain.from_iterable(map(parts_of, states)))
    by_part: dict[str, list[str]] = {}
    try:
        found = list(differing(*states, skip=lambda key, path: not show_all and is_of_the_clock(path)))
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
    same = f"identical: {len(parts)} entries, bit by bit" + ("" if show_all else ", except clock readings")
    lines.append(f"different in {total} places" if total else same)
    return "\n".join(lines), total > 0


def _read_whole(path: str) -> dict[str, Any]:
    state = _read(path)
    verify_shards(state, path)
    return fill_shards(state, path)


# ---------------------------------------------------------------------------- the command line


def main(args: argparse.Namespace) -> int:
    """Run, and return the exit code."""
    with user_errors_exit():
        if args.other:
            _check_are_files(args.path, args.other)
            text, is_bad = compare_files(args.path, args.other, args.all)
        elif os.path.isdir(args.path):
            text, is_bad = describe_folder(args.path)
        else:
            text, is_bad = describe_file(args.path), False
        print(text)
    return int(is_bad)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("path", metavar="FILE", help="a checkpoint, or a folder of checkpoints")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="a second checkpoint to compare with the first")
    parser.add_argument(
        "--all", action="store_true", help="show every difference, also if there are many, and those of clocks"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(main(parse_args()))
