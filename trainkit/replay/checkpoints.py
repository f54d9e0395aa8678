"""The checkpoints of a run in the order of its iterations, read without a change to the run."""

import logging
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.averaged import EVALUATED, TRAINED
from trainkit.checkpoint.contents import CLOCK_READINGS, differing, is_of_the_clock
from trainkit.checkpoint.folder import checkpoint_files
from trainkit.checkpoint.shards import KEY as SHARDS

logger = logging.getLogger(__name__)


class Saved(NamedTuple):
    """A checkpoint: the run stands in stage 1 of ``iteration`` (its update is not done) or in stage 2."""

    iteration: int
    stage: int
    path: str
    state: Mapping[str, Any]

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def origin(self) -> dict[str, Any]:
        return dict(self.state["trainer"]["origin"])


def around(run: str, iteration: int) -> tuple[Saved | None, Saved | None]:
    """The newest checkpoint from which ``iteration`` can be reached, and the first one that has its update.

    Raises:
        CheckpointError: there is none of a run that says how it was started, or the run is sharded.
    """
    found = sorted(_read(run), key=lambda saved: saved[:3])
    if not found:
        raise CheckpointError(
            f"'{run}' has no checkpoint that says how its run was started; name the folder with the checkpoints of a "
            "DefaultTrainer, written by this version of trainkit or a later one"
        )
    if sharded := [saved.name for saved in found if SHARDS in saved.state]:
        raise CheckpointError(f"{sharded[0]} has shards; runs with MODEL.PARALLEL fsdp cannot be replayed")
    before = [saved for saved in found if saved[:2] <= (iteration, 1)]
    after = [saved for saved in found if saved[:2] > (iteration, 1)]
    return (before[-1] if before else None), (after[0] if after else None)


def _read(run: str) -> Iterator[Saved]:
    for path in checkpoint_files(run):
        try:
            # mapped: of large ones only what is looked at is read; the one that is loaded is verified then
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            trainer = state["trainer"]
            done, stage = trainer["iteration"], trainer["position"]["stage"]
            if trainer["origin"]:
                yield Saved(done + (stage == 1), stage, path, state)
        except (OSError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError) as error:
            logger.info("%s is no checkpoint to replay from: %s", path, error)


def first_difference(state: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Where a state and that of a file differ; "" if nowhere.

    Left out: readings of clocks, where writers stand in their files, and the text of settings.
    """

    def skip(key: Any, path: str) -> bool:
        return is_of_the_clock(path) or "/hooks/PeriodicWriter" in path or path in (EVALUATED, "trainer/settings")

    return next(differing(_trained(state), _trained(other), skip=skip), "")


def _trained(state: Mapping[str, Any]) -> dict[str, Any]:
    """With the weights that were trained as its model, whichever the file is for."""
    found = {key: value for key, value in state.items() if key not in (TRAINED, "__trainkit_format__")}
    return {**found, "model": state.get(TRAINED, state["model"])}


Values = dict[str, dict[int, float]]
"""name -> iteration -> the value that was logged."""


def logged_values(storage: Mapping[str, Any], start: int, end: int) -> Values:
    """Of the iterations ``start`` (included) to ``end`` (excluded), from the state of a storage, clocks aside."""
    found: Values = {}
    for name, history in storage["histories"].items():
        pairs = zip(history["iterations"].tolist(), history["values"].tolist(), strict=True)
        if name not in CLOCK_READINGS:
            found[name] = {iter: value for iter, value in pairs if start <= iter < end}
    return found


def compare_values(left: Values, right: Values) -> tuple[int, tuple[int, str, float, float] | None]:
    """How many values both have, and the first that differs: iteration, name, both values."""
    count, different = 0, []
    for name in left.keys() & right.keys():
        for iter in left[name].keys() & right[name].keys():
            pair = left[name][iter], right[name][iter]
            count += 1
            if repr(pair[0]) != repr(pair[1]):
                different.append((iter, name, *pair))
    return count, min(different, key=lambda found: found[:2], default=None)
