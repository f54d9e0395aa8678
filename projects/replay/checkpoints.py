"""The checkpoints of a run, in the order of iterations, and comparisons with them. The files are only read."""

import logging
import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from trainkit.projects.replay.contents import CLOCK_READINGS, differing, is_of_the_clock

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file
from trainkit.checkpoint.folder import checkpoint_files
from trainkit.utils.plugins import FORMATS

logger = logging.getLogger(__name__)

# errors of reading a file that is not a checkpoint of a trainer
_UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError)
_OF_SCHEDULE = re.compile(r"lr\b|lr_|epoch|momentum|weight_decay|data_epoch")  # logged values that no sample changes
_NOT_REPEATED = ("evaluated", "trainer/settings", "trainer/left_out", "trainer/position/finished_early")


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


def with_origin(paths: Iterable[str]) -> list[Saved]:
    """The files that say how their run was started, by iteration; only entries that are used are read."""
    found = list[Saved]()
    for path in paths:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            done, stage = state["trainer"]["iteration"], state["trainer"]["position"]["stage"]
            if state["trainer"]["origin"]:
                found.append(Saved(done + (stage == 1), stage, path, state))
        except _UNREADABLE as error:
            logger.info("%s does not say how its run was started: %s", path, error)
    return sorted(found, key=lambda saved: saved[:3])


def checkpoints_of(run: str) -> list[Saved]:
    """All checkpoints of a run from which a replay can start, in the order of their iterations."""
    return with_origin(checkpoint_files(run))


def capsules_of(run: str) -> list[Saved]:
    """All capsules of a run."""
    return with_origin(map(str, Path(run).glob("capsule.rank*.pt")))


def around(run: str, iteration: int) -> tuple[Saved | None, Saved | None]:
    """The newest checkpoint from which ``iteration`` can be reached, and the first checkpoint after its update.

    If no checkpoint was written after the update, the second result is the capsule of this step or of a later step.

    Raises:
        CheckpointError: no checkpoint or capsule says how the run was started, or the run is sharded.
    """
    found = checkpoints_of(run)
    capsules = [saved for saved in capsules_of(run) if saved.iteration >= iteration]
    if not found and not capsules:
        raise CheckpointError(f"'{run}' has no checkpoint of a DefaultTrainer that says how its run was started")
    if sharded := [saved.path for saved in found if saved.state.keys() & FORMATS]:
        raise CheckpointError(f"'{sharded[0]}' is in parts of several ranks; such a run cannot be replayed")
    before = [saved for saved in found if saved[:2] <= (iteration, 1)]
    after = [saved for saved in found if saved[:2] > (iteration, 1)] or capsules
    return (before[-1] if before else None), (after[0] if after else None)


def prove(reached: Sequence[Mapping[str, Any]], saved: Saved) -> str:
    """Compare the state that the replay has reached with the state in a checkpoint; returns the result as text.

    Left out: clock readings, what was written to files, the text of settings, and the reason of an early end.

    Args:
        reached: one state; empty if the replay has failed.
    """
    name = os.path.basename(saved.path)
    if not reached:
        return f"DIFFERENT: the replay has not reached {name}"

    def skip(key: Any, path: str) -> bool:
        of_other_hooks = "/hooks/Periodic" in path or "/hooks/RunRecord" in path
        return is_of_the_clock(path) or of_other_hooks or path in _NOT_REPEATED

    states = _with_trained_weights(reached[0]), _with_trained_weights(read_file(saved.path))
    if difference := next(differing(*states, skip=skip), ""):
        return f"DIFFERENT from {name} in {difference} (first here, second in the file)"
    return f"every byte equals {name}: model, optimizer, random state, data, hooks, storage"


def _with_trained_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in state.items() if key != "trained_model"}
    return {**found, "model": state.get("trained_model", state["model"])}


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

    Returns:
        A text, and whether all are equal; None if none of them depends on the data.
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
