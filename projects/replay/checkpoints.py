"""The checkpoints of a run, by iteration, compared with a replay. The files are only read."""

import logging
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from trainkit.projects.replay.failure import Failure

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.differences import CLOCK_READINGS, differing, is_of_the_clock
from trainkit.checkpoint.file import read_file
from trainkit.utils.plugins import find_plugins

logger = logging.getLogger(__name__)

# logged values that no sample changes
_OF_SCHEDULE = re.compile(r"lr\b|lr_|epoch|momentum|weight_decay|data_epoch")
_TRAINER = r"(ranks/\d+/)?trainer"
_NOT_REPEATED = re.compile(
    rf"evaluated|{_TRAINER}/(boundary/passed.*|end/(finished_early|settings_of_early_end.*)|hooks/Periodic.*)"
)


class Saved(NamedTuple):
    """A checkpoint after the update of iteration ``done``, and whether the boundary of this update is over."""

    done: int
    boundary_is_over: bool
    path: str
    state: Mapping[str, Any]

    @property
    def iteration(self) -> int:
        """With which a run continues from it."""
        return self.done + self.boundary_is_over


class Files(NamedTuple):
    """The files of a run, by iteration; only entries that are used are read.

    Attributes:
        checkpoints: those from which a replay can start.
        capsules: one of each process whose step has failed.
        damaged: the name of a damaged checkpoint -> what is wrong with it.
    """

    checkpoints: list[Saved]
    capsules: list[Saved]
    damaged: dict[str, str]


def files_of(run: str) -> Files:
    """The checkpoints and the capsules of a run, and the files that cannot be used."""
    damaged: dict[str, str] = {}
    checkpoints = _read_all(run, "[!.]*.pth", damaged)
    capsules = _read_all(run, "capsule.rank*.pt", damaged)
    return Files(checkpoints, capsules, damaged)


def _read_all(run: str, pattern: str, damaged: dict[str, str]) -> list[Saved]:
    found: list[Saved] = []
    for path in map(str, Path(run).glob(pattern)):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            # a file of an early version has none of these
            _ = state["trainer"]["origin"]["facts"]
            _ = state["trainer"]["num_threads"]
            iteration = state["trainer"]["iteration"]
            boundary_is_over = state["trainer"]["boundary"]["is_over"]
            found.append(Saved(iteration, boundary_is_over, path, state))
        except Exception as error:  # torch and pickle raise many types
            logger.info("%s is not used: %s: %s", path, type(error).__name__, error)
            damage = damage_of(path)
            if damage:
                damaged[os.path.basename(path)] = damage
    return sorted(found, key=lambda saved: (saved.done, saved.iteration, saved.path))


def damage_of(path: str) -> str:
    """What is wrong with the content of a file; "" if it matches its checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except Exception as error:  # zipfile raises many types
        return f"{type(error).__name__}: {error}"
    return f"its record '{record}' does not match its checksum" if record else ""


class Place(NamedTuple):
    """Where an iteration is in a run.

    Attributes:
        before: the newest checkpoint from which the iteration can be reached; None: the run starts there.
        after: the first checkpoint after its update; if there is none, the capsule of this step or of a later step.
        done: the last iteration that the run has done, as far as its files say.
        failures: of the run, one of each process.
        notes: the damaged checkpoints that the replay would have used.
    """

    before: Saved | None
    after: Saved | None
    done: int
    failures: Sequence[Failure] = ()
    notes: Sequence[str] = ()


def around(run: str, iteration: int) -> Place:
    """The checkpoints of a run around an iteration.

    Raises CheckpointError: no checkpoint or capsule says how the run was started, or the run is sharded.
    """
    files = files_of(run)
    formats = {*find_plugins().formats}
    sharded = [saved.path for saved in files.checkpoints if saved.state.keys() & formats]
    if sharded:
        raise CheckpointError(
            f"'{sharded[0]}' is in parts of several ranks; such a run cannot be replayed"
        )
    earlier = [saved for saved in files.checkpoints if saved.done < iteration]
    later = [saved for saved in files.checkpoints if saved.done >= iteration]
    later += [saved for saved in files.capsules if saved.iteration >= iteration]
    before = _first_intact(earlier[::-1], files.damaged)
    after = _first_intact(later, files.damaged)
    if before is None and after is None:
        reasons = [f"{name}: {damage}" for name, damage in files.damaged.items()]
        text = f"'{run}' has no checkpoint of a DefaultTrainer that says how its run was started"
        raise CheckpointError("; damaged is ".join([text, *reasons]))
    done = max(saved.done for saved in (*files.checkpoints, *files.capsules))
    notes = [
        f"{name} is damaged, so another file is used: {damage}"
        for name, damage in files.damaged.items()
        if is_between(name, before, after)
    ]
    return Place(before, after, done, failures_of(files), notes)


def _first_intact(candidates: Sequence[Saved], damaged: dict[str, str]) -> Saved | None:
    """The first file that matches its checksums, which are not looked at when single entries are read."""
    for saved in candidates:
        damage = damage_of(saved.path)
        if not damage:
            return saved
        damaged[os.path.basename(saved.path)] = damage
    return None


def is_between(name: str, before: Saved | None, after: Saved | None) -> bool:
    """Whether the replay would have used the file; only the number in its name says where it belongs."""
    number = re.fullmatch(r"model_(\d+)\.pth", name)
    if number is None:
        return after is None or "capsule" in after.state
    is_early = before is not None and int(number[1]) < before.done
    is_late = after is not None and int(number[1]) > after.done
    return not is_early and not is_late


def failures_of(files: Files) -> list[Failure]:
    """The failures of a run: the newest one of each process."""
    last_done = max((saved.done for saved in files.checkpoints), default=-1)
    found = []
    for saved in files.capsules:
        rank = re.search(r"rank(\d+)", os.path.basename(saved.path))
        found.append(failure_in(saved, int(rank[1]) if rank else 0, last_done))
    return found


def failure_in(capsule: Saved, rank: int = 0, last_done: int = -1) -> Failure:
    """The failure that a capsule has recorded."""
    facts = capsule.state["capsule"]
    iteration = facts["iteration"]
    return Failure(iteration, facts["error"], facts["losses"], rank, iteration <= last_done)


def prove_equal(reached: Sequence[Mapping[str, Any]], saved: Saved) -> str:
    """Compare the state that the replay has reached (none: it has failed) with the state in a checkpoint, as text.

    Left out: clock readings, what was written to files, and the reason of an early end.
    """
    name = os.path.basename(saved.path)
    if not reached:
        return f"DIFFERENT: the replay has not reached {name}"
    here = dict(reached[0])
    there = dict(read_file(saved.path))
    for state in (here, there):
        state["model"] = state.pop("trained_model", state["model"])

    def is_left_out(key: Any, path: str) -> bool:
        return _NOT_REPEATED.fullmatch(path) is not None or is_of_the_clock(path)

    difference = next(differing(here, there, skip=is_left_out), "")
    if difference:
        return f"DIFFERENT from {name} in {difference} (first here, second in the file)"
    return f"every byte equals {name}: model, optimizer, random state, data, hooks, storage"


Values = dict[int, dict[str, float]]
"""iteration -> name -> the value that was logged."""


def logged_values(storage: Mapping[str, Any], start: int, end: int) -> Values:
    """The values of iterations ``start`` to ``end`` - 1 in the state of a storage, without clock readings."""
    found: Values = {}
    for name, history in sorted(storage["histories"].items()):
        if name in CLOCK_READINGS:
            continue
        iterations = history["iterations"].tolist()
        values = history["values"].tolist()
        for iter, value in zip(iterations, values, strict=True):
            if start <= iter < end:
                found.setdefault(iter, {})[name] = value
    return found


def compare_way(values: Values, saved: Saved | None, end: int) -> tuple[str, bool | None]:
    """Compare the values up to iteration ``end`` with those in a checkpoint.

    Returns a text, and whether all are equal; None if none of them depends on the data.
    """
    if saved is None:
        return "nothing to compare with: the run has stored nothing after this step", None
    first = min(values, default=end)
    last = max(values, default=end)
    stored = logged_values(saved.state["trainer"]["storage"], first, end + 1)
    where = f"in {os.path.basename(saved.path)}, iterations {first} to {last}"
    num_compared = 0
    depends_on_data = False
    for iter, row in sorted(values.items()):
        stored_row = stored.get(iter, {})
        for name, value in row.items():
            if name not in stored_row:
                continue
            # repr shows every bit, and NaN equals NaN
            here = repr(value)
            there = repr(stored_row[name])
            if here != there:
                text = f"DIFFERENT: {name} of iteration {iter} is {here} here and {there} {where}"
                return text, False
            num_compared += 1
            if not _OF_SCHEDULE.match(name):
                depends_on_data = True
    text = f"{num_compared} of {num_compared} logged values equal those {where}"
    if not depends_on_data:
        return f"{text}; none of them depends on the data", None
    return text, True
