"""The checkpoints of a run, by iteration, and comparisons of states, bit by bit. The files are only read."""

import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file
from trainkit.utils.plugins import FORMATS

logger = logging.getLogger(__name__)

CAPSULES = "capsule.rank*.pt"
# errors of reading a file that is not a checkpoint of a trainer
_UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError)
_OF_SCHEDULE = re.compile(r"lr\b|lr_|epoch|momentum|weight_decay|data_epoch")  # logged values that no sample changes
_NOT_REPEATED = re.compile(
    r"evaluated|(ranks/\d+/)?trainer/(settings|left_out|position/finished_early|hooks/(Periodic|RunRecord).*)"
)
CLOCK_READINGS = frozenset(
    ["time", "data_time", "rank_data_time", "eta_seconds", "samples_per_sec", "tokens_per_sec", "mfu_pct"]
)
_TRAINER, _WRITER = r"(ranks/\d+/)?trainer", r"hooks/PeriodicWriter(#\d+)?/writers/\d+/state"
_SCALAR = re.compile(rf"{_TRAINER}/(storage/\w+|{_WRITER}/taken)/(?P<name>\w+)")
_OF_FILES = re.compile(rf"{_TRAINER}/{_WRITER}/(length|sizes|id)|{_TRAINER}/(origin|hooks/RunRecord/parents)")


def is_of_the_clock(path: str) -> bool:
    """Whether an entry differs between equal runs: clock readings, sizes of files with them, how a run started."""
    scalar = _SCALAR.fullmatch(path)
    return (scalar is not None and scalar["name"] in CLOCK_READINGS) or _OF_FILES.fullmatch(path) is not None


def differing(
    left: Any,
    right: Any,
    path: str = "",
    skip: Callable[[Any, str], bool] = lambda key, path: False,
    seen: set[tuple[int, int]] | None = None,
) -> Iterator[str]:
    """Each place where two nested values differ, with a description; values are compared bit by bit.

    ``path`` is that of both values, with names joined by "/". ``skip``, called with the key and the path of each entry
    of a mapping, leaves it out by True. ``seen``: pairs that were compared; many ways may lead to one object.
    """
    seen = set() if seen is None else seen
    if isinstance(left, Mapping | list | tuple):
        if (id(left), id(right)) in seen:
            return
        seen.add((id(left), id(right)))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if difference := _difference_of_tensors(left.detach(), right.detach()):
            yield f"{path}: {difference}"
    elif isinstance(left, Mapping) and isinstance(right, Mapping):  # of any class: programs may use different classes
        for key in [*left, *(key for key in right if key not in left)]:
            here = f"{path}/{key}".lstrip("/")
            if skip(key, here):
                continue
            if key not in left or key not in right:
                yield f"{here}: only in the {'first' if key in left else 'second'}"
            else:
                yield from differing(left[key], right[key], here, skip, seen)
    elif type(left) is not type(right):
        yield f"{path}: {type(left).__name__} and {type(right).__name__}"
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            yield f"{path}: {len(left)} and {len(right)} entries"
        for index, pair in enumerate(zip(left, right, strict=False)):
            yield from differing(*pair, f"{path}/{index}", skip, seen)
    elif repr(left) != repr(right):  # repr shows every bit of a float, but NaN equals NaN
        yield f"{path}: {left!r:.60} and {right!r:.60}"


def _difference_of_tensors(left: Tensor, right: Tensor) -> str:
    left, right = (each.dequantize() if each.is_quantized else each.to_dense() for each in (left, right))
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return " and ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in (left, right))
    if left.is_meta or right.is_meta:
        return ""  # in a rank's own part, for a sharded tensor, which is compared in the part of all ranks
    left, right = left.cpu(), right.cpu()  # a replay compares the state on a GPU with a file
    bits = [tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (left, right)]  # [values, bytes]
    num_different = int((bits[0] != bits[1]).any(dim=1).sum())
    if not num_different:
        return ""
    size = "" if left.is_complex() else f", by at most {(left.double() - right.double()).abs().max().item():.3g}"
    return f"{num_different} of {left.numel()} values{size}"


class Saved(NamedTuple):
    """A checkpoint. A run continues from it with ``stage`` of ``iteration``; in stage 1 the update is not done."""

    iteration: int
    stage: int
    path: str
    state: Mapping[str, Any]

    @property
    def done(self) -> int:
        """The last iteration whose update is done."""
        return self.iteration - (self.stage == 1)


def saved_in(run: str, pattern: str = "[!.]*.pth") -> list[Saved]:
    """The checkpoints of a run from which a replay can start, by iteration; only entries that are used are read."""
    found = list[Saved]()
    for path in map(str, Path(run).glob(pattern)):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            done, stage = state["trainer"]["iteration"], state["trainer"]["position"]["stage"]
            if state["trainer"]["origin"]:
                found.append(Saved(done + (stage == 1), stage, path, state))
        except _UNREADABLE as error:
            logger.info("%s does not say how its run was started: %s", path, error)
    return sorted(found, key=lambda saved: saved[:3])


def around(run: str, iteration: int) -> tuple[Saved | None, Saved | None]:
    """The newest checkpoint from which ``iteration`` can be reached, and the first checkpoint after its update.

    If no checkpoint was written after the update, the second result is the capsule of this step or of a later step.
    Raises CheckpointError: no checkpoint or capsule says how the run was started, or the run is sharded.
    """
    found = saved_in(run)
    capsules = [saved for saved in saved_in(run, CAPSULES) if saved.iteration >= iteration]
    if not found and not capsules:
        raise CheckpointError(f"'{run}' has no checkpoint of a DefaultTrainer that says how its run was started")
    if sharded := [saved.path for saved in found if saved.state.keys() & FORMATS]:
        raise CheckpointError(f"'{sharded[0]}' is in parts of several ranks; such a run cannot be replayed")
    before = [saved for saved in found if saved[:2] <= (iteration, 1)]
    after = [saved for saved in found if saved[:2] > (iteration, 1)] or capsules
    return (before[-1] if before else None), (after[0] if after else None)


def prove(reached: Sequence[Mapping[str, Any]], saved: Saved) -> str:
    """Compare the state that the replay has reached (none: it has failed) with the state in a checkpoint, as text.

    Left out: clock readings, what was written to files, the text of settings, and the reason of an early end.
    """
    name = os.path.basename(saved.path)
    if not reached:
        return f"DIFFERENT: the replay has not reached {name}"

    def skip(key: Any, path: str) -> bool:
        return is_of_the_clock(path) or _NOT_REPEATED.fullmatch(path) is not None

    states = [dict(reached[0]), dict(read_file(saved.path))]
    for state in states:
        state["model"] = state.pop("trained_model", state["model"])
    if difference := next(differing(states[0], states[1], skip=skip), ""):
        return f"DIFFERENT from {name} in {difference} (first here, second in the file)"
    return f"every byte equals {name}: model, optimizer, random state, data, hooks, storage"


Values = dict[int, dict[str, float]]
"""iteration -> name -> the value that was logged."""


def logged_values(storage: Mapping[str, Any], start: int, end: int) -> Values:
    """The values of iterations ``start`` to ``end`` - 1 in the state of a storage, without clock readings."""
    found: Values = {}
    for name, history in sorted(storage["histories"].items()):
        for iter, value in zip(history["iterations"].tolist(), history["values"].tolist(), strict=True):
            if name not in CLOCK_READINGS and start <= iter < end:
                found.setdefault(iter, {})[name] = value
    return found


def compare_way(values: Values, saved: Saved | None, end: int) -> tuple[str, bool | None]:
    """Compare the values up to iteration ``end`` with those in a checkpoint.

    Returns a text, and whether all are equal; None if none of them depends on the data.
    """
    if saved is None:
        return "nothing to compare with: the run has stored nothing after this step", None
    first, last = min(values, default=end), max(values, default=end)
    stored = logged_values(saved.state["trainer"]["storage"], first, end + 1)
    rows = [(iter, row, stored.get(iter, {})) for iter, row in sorted(values.items())]
    both = [(iter, name, row[name], there[name]) for iter, row, there in rows for name in row if name in there]
    where = f"in {os.path.basename(saved.path)}, iterations {first} to {last}"
    for iter, name, here, there in both:
        if repr(here) != repr(there):
            return f"DIFFERENT: {name} of iteration {iter} is {here!r} here and {there!r} {where}", False
    is_compared = any(not _OF_SCHEDULE.match(name) for _, name, *_ in both)
    note = "" if is_compared else "; none of them depends on the data"
    return f"{len(both)} of {len(both)} logged values equal those {where}{note}", is_compared or None
