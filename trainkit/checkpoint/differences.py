"""Where two states, two checkpoints or the folders of two runs differ, bit by bit.

The files are only read.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.errors import CheckpointError
from trainkit.checkpoint.file import SUFFIX, read_file
from trainkit.checkpoint.format import format_of
from trainkit.utils.file_io import refuse_pipe

METRICS_FILE = "metrics.json"
CLOCK_READINGS = {
    "time",
    "data_time",
    "rank_data_time",
    "eta_seconds",
    "samples_per_sec",
    "tokens_per_sec",
    "mfu_pct",
}
"""Logged values that differ between equal runs."""

# the entries of a checkpoint that differ between equal runs
_TRAINER = r"(ranks/\d+/)?trainer"
_WRITER = r"hooks/PeriodicWriter(#\d+)?/writers/\d+/state"
_OF_THE_CLOCK = re.compile(
    rf"run_id|{_TRAINER}/((storage/\w+|{_WRITER}/taken)/(?P<scalar>.+)"
    rf"|{_WRITER}/(length|sizes|run_id)|origin)"
)


def is_of_the_clock(path: str, readings: Collection[str] = CLOCK_READINGS) -> bool:
    """Whether an entry of a checkpoint differs between equal runs.

    Such entries are clock readings, the sizes of files with them, and which run it is.

    Args:
        readings: the names of the clock readings.
    """
    found = _OF_THE_CLOCK.fullmatch(path)
    if found is None:
        return False
    return found["scalar"] is None or found["scalar"] in readings


def differing(
    left: Any,
    right: Any,
    path: str = "",
    skip: Callable[[Any, str], bool] | None = None,
    seen: set[tuple[int, int]] | None = None,
) -> Iterator[str]:
    """Each place where two nested values differ, with a description; bits are compared.

    Args:
        path: the path of both values: names joined by "/".
        skip: called with the key and the path of each entry of a mapping; True leaves it out.
        seen: pairs that were compared already; many ways may lead to one object.
    """
    if seen is None:
        seen = set()
    if isinstance(left, Mapping | list | tuple):
        pair = (id(left), id(right))
        if pair in seen:
            return
        seen.add(pair)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        difference = _difference_of_tensors(left.detach(), right.detach())
        if difference:
            yield f"{path}: {difference}"
    # of any class: programs may use different classes
    elif isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in dict.fromkeys([*left, *right]):
            here = f"{path}/{key}".lstrip("/")
            if skip is not None and skip(key, here):
                continue
            if key not in right:
                yield f"{here}: only in the first"
            elif key not in left:
                yield f"{here}: only in the second"
            else:
                yield from differing(left[key], right[key], here, skip, seen)
    elif type(left) is not type(right):
        yield f"{path}: {type(left).__name__} and {type(right).__name__}"
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            yield f"{path}: {len(left)} and {len(right)} entries"
        for index, (mine, other) in enumerate(zip(left, right, strict=False)):
            yield from differing(mine, other, f"{path}/{index}", skip, seen)
    elif repr(left) != repr(right):  # repr shows every bit of a float, but NaN equals NaN
        yield f"{path}: {left!r:.60} and {right!r:.60}"


def _difference_of_tensors(left: Tensor, right: Tensor) -> str:
    left = _dense(left)
    right = _dense(right)
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return f"{left.dtype} {list(left.shape)} and {right.dtype} {list(right.shape)}"
    if left.is_meta or right.is_meta:
        # one rank's own part of a divided tensor, which is compared in the part of all ranks
        return ""
    # one may be on a GPU, and the other one from a file
    left = left.cpu()
    right = right.cpu()
    differs = bytes_of(left) != bytes_of(right)
    num_different = int(differs.any(dim=1).sum())
    if num_different == 0:
        return ""
    text = f"{num_different} of {left.numel()} values"
    if left.is_complex():
        return text
    largest = (left.double() - right.double()).abs().max().item()
    return f"{text}, by at most {largest:.3g}"


def _dense(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8 ``[values, bytes]`` of a dense tensor."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


# ------------------------------------------------------------------------ folders of two runs


def read_whole(path: str) -> dict[str, Any]:
    """The verified state of a checkpoint, also of one in several files. Raises CheckpointError."""
    state: dict[str, Any] = read_file(path)
    return format_of(state).fill(state, path)


def files_in(folder: str | os.PathLike[str], suffix: str) -> list[str]:
    """The files below a folder whose names end with ``suffix``, by path; without earlier runs."""
    found = []
    for path in sorted(Path(folder).rglob(f"*{suffix}")):
        name = path.relative_to(folder)
        is_left_out = any(part.startswith((".", "previous_")) for part in name.parts)
        if not is_left_out:
            found.append(str(name))
    return found


def differing_files(
    left: str, right: str, readings: Collection[str] = CLOCK_READINGS
) -> Iterator[str]:
    """Each place where two checkpoints differ, as ``path: description``.

    Args:
        left: the path of a file.
        right: that of the other one.
        readings: the names of clock readings, which are left out.

    Raises:
        CheckpointError: a file cannot be read.
    """

    def is_left_out(key: Any, path: str) -> bool:
        return is_of_the_clock(path, readings)

    yield from differing(read_whole(left), read_whole(right), skip=is_left_out)


def differing_checkpoints(
    left: str, right: str, readings: Collection[str] = CLOCK_READINGS
) -> Iterator[str]:
    """Each place where the checkpoints in two folders differ, as ``file: path: description``.

    Arguments and errors as above.
    """
    mine = files_in(left, SUFFIX)
    others = files_in(right, SUFFIX)
    for name in sorted({*mine, *others}):
        if name not in others:
            yield f"{name}: only in the first"
        elif name not in mine:
            yield f"{name}: only in the second"
        else:
            pair = os.path.join(left, name), os.path.join(right, name)
            for difference in differing_files(*pair, readings):
                yield f"{name}: {difference}"


def differing_metrics(
    left: str, right: str, readings: Collection[str] = CLOCK_READINGS
) -> Iterator[str]:
    """Each value that differs in the files metrics.json of two runs; arguments as above."""
    mine = files_in(left, METRICS_FILE)
    others = files_in(right, METRICS_FILE)
    for name in sorted({*mine, *others}):
        if name not in others:
            yield f"{name}: only in the first"
            continue
        if name not in mine:
            yield f"{name}: only in the second"
            continue
        rows = metrics_in(os.path.join(left, name), readings)
        other_rows = metrics_in(os.path.join(right, name), readings)
        for row, other in zip(rows, other_rows, strict=False):
            where = f"{name}: iteration {row.get('iteration')}"
            for difference in differing(row, other):
                yield f"{where}: {difference}"
        if len(rows) != len(other_rows):
            yield f"{name}: {len(rows)} and {len(other_rows)} lines"


def metrics_in(
    path: str | os.PathLike[str], readings: Collection[str] = CLOCK_READINGS
) -> list[dict[str, Any]]:
    """The lines of a metrics.json without clock readings, as far as something is left of them.

    Raises:
        CheckpointError: the file cannot be read, or a line is no JSON object.
    """
    rows = []
    try:
        refuse_pipe(path)
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        for line in lines:
            row = dict(json.loads(line))
            kept = {name: value for name, value in row.items() if name not in readings}
            if kept.keys() - {"iteration", "epoch"}:
                rows.append(kept)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"cannot read '{path}' as lines of metrics: {error}") from error
    return rows
