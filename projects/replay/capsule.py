"""The capsule: a file with a step that has failed, and the command that repeats the step."""

import contextlib
import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trainkit.projects.replay.origin import describe_origin

from trainkit.checkpoint.file import write_file
from trainkit.checkpoint.state import plain_state
from trainkit.config import ConfigError
from trainkit.engine.loop import TrainerBase
from trainkit.engine.step import SimpleTrainer
from trainkit.utils import comm
from trainkit.utils.device import device_of, unwrap_model

logger = logging.getLogger(__name__)

REPLAY = "python -m trainkit.projects.replay"

# saving the first would cost time in each step; the second is as large as the model
_NOTES = (
    "random state and buffers are those after the forward pass that has failed",
    "the optimizer has no momentum, so its update is another one",
)


def leave_capsule(trainer: Any, error: BaseException, origin: Mapping[str, Any]) -> str:
    """Write the capsule of a failed step of a `DefaultTrainer`; it replaces the capsule of an earlier failure.

    If an earlier step has failed, or if the weights have been updated since, the capsule holds no step. It then holds
    how the run was started and what the run has logged since its last checkpoint. An error while the capsule is written
    is only a warning.

    Args:
        origin: see `describe_origin`; empty if this rank has not described it.

    Returns:
        The command that repeats the step; "" if there is no step to repeat.
    """
    inside = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_trainer = [frame.f_code.co_name for frame in inside if isinstance(frame.f_locals.get("self"), TrainerBase)]
    is_before_update = trainer.position.stage == 1 and bool({"run_step", "before_step"}.intersection(of_trainer))
    iteration = failed_iteration(error)  # the trainer may be in a later one
    is_of_step = iteration is not None or is_before_update
    if isinstance(error, ConfigError) or not isinstance(error, Exception) or not is_of_step:
        return ""
    iteration = trainer.iter if iteration is None else iteration
    commands = [_replay_of_run(trainer, iteration)]
    try:
        # with logical ranks, one process holds only a part of the step; a replay from the checkpoint repeats all parts
        is_whole = is_before_update and iteration == trainer.iter and not trainer.cfg.SOLVER.get("LOGICAL_RANKS")
        is_whole = is_whole and trainer.accumulation_steps == 1  # of several micro-batches the others are gone
        has_step = is_whole and _of_step(trainer, "batch") is not None and not _updates(inside)
        # not .pth, so that no run resumes from it
        path = os.path.abspath(os.path.join(trainer.cfg.OUTPUT_DIR, f"capsule.rank{comm.get_rank()}.pt"))
        write_file(_contents(trainer, error, commands[0], has_step, origin), path)
        if has_step:
            commands.insert(0, f"{REPLAY} {shlex.quote(path)}")
    except Exception as other:
        logger.warning("The capsule of the failed step is not written: %s: %s", type(other).__name__, other)
        with contextlib.suppress(Exception):
            if not trainer.checkpointer.has_checkpoint():
                return ""  # it is not known how the run was started
    is_known = bool(origin and origin["module"]) or os.path.isfile(sys.argv[0])  # not python -c, nor from stdin
    return ", or from the checkpoint: ".join(commands) + ("" if is_known else " -- and the command of the run")


def failed_iteration(error: BaseException) -> int | None:
    """The iteration that an error about values that are not finite names; None: another error."""
    found = re.search(r"not finite in iteration (\d+)", str(error)) if isinstance(error, FloatingPointError) else None
    return int(found[1]) if found else None


def _updates(frames: Sequence[FrameType]) -> bool:
    """Whether the update has started."""
    steps = [frame for frame in frames if isinstance(frame.f_locals.get("self"), SimpleTrainer)]
    return any(frame.f_code.co_name == "update" for frame in steps)


def _of_step(trainer: Any, name: str) -> Any:
    """``batch`` or ``losses`` of the present step; None if the step has not come so far."""
    with contextlib.suppress(RuntimeError):
        return getattr(trainer, name)
    return None


def _contents(
    trainer: Any, error: Exception, command: str, has_step: bool, origin: Mapping[str, Any]
) -> dict[str, Any]:
    """A checkpoint without the optimizer's state (momentum), plus the batch and the failure."""
    notes = [*_NOTES]
    state = trainer.state_dict()
    state["_trainer"]["optimizer"] = {**state["_trainer"]["optimizer"], "state": {}}
    # one process is enough to repeat a capsule
    state["world_size"] = 1
    state["origin"] = origin or describe_origin(trainer.given_cfg.dump(), device_of(trainer.model), None)
    losses = (_of_step(trainer, "losses") if has_step else None) or {}
    batches = [_of_step(trainer, "batch")] if has_step else []
    names_of_last = getattr(trainer.data_loader, "names_of_last", None)
    failure = {
        "iteration": trainer.iter,
        "rank": comm.get_rank(),
        "batches": [_storable(batch, "", notes) for batch in batches],
        "samples": names_of_last(1) if names_of_last is not None and has_step else [],
        "losses": {name: float(loss) for name, loss in losses.items()},
        "error": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "notes": notes,
        "command": command,
    }
    others = {key: obj.state_dict() for key, obj in trainer.checkpointer.checkpointables.items() if key != "trainer"}
    model = unwrap_model(trainer.model).state_dict() if has_step else {}
    return {"model": model, **others, "trainer": state, "capsule": failure}


def _storable(value: Any, path: str, notes: list[str]) -> Any:
    """``value`` converted to types that load without running code; adds to ``notes`` what was converted or left out."""
    if isinstance(value, Mapping):
        items = {key: item for key, item in value.items() if type(key) in (str, int, float, bool)}
        lost = [key for key in value if key not in items]
        notes += [f"the batch{path}: the keys {lost!r:.80} are left out"] * bool(lost)
        return {key: _storable(item, f"{path}/{key}", notes) for key, item in items.items()}
    if isinstance(value, list | tuple):
        stored = [_storable(item, f"{path}/{i}", notes) for i, item in enumerate(value)]
        return stored if isinstance(value, list) else tuple(stored)
    with contextlib.suppress(TypeError):
        return plain_state(value)
    converted: Any = None
    with contextlib.suppress(Exception):
        is_number = isinstance(value, np.generic)
        converted = value.item() if is_number else torch.as_tensor(value).detach().as_subclass(Tensor).clone()
    what = "left out" if converted is None else f"a {type(converted).__name__} now"
    notes.append(f"the batch{path}: the {type(value).__name__} is {what}")
    return converted


def _replay_of_run(trainer: Any, iteration: int) -> str:
    """The command that repeats the step from the last checkpoint."""
    world_size = 1 if trainer.cfg.SOLVER.get("LOGICAL_RANKS") else comm.get_world_size()
    start = f"torchrun --nproc-per-node {world_size} -m " if world_size > 1 else "python -m "
    folder = os.path.abspath(trainer.checkpointer.save_dir)
    return f"{REPLAY.replace('python -m ', start)} {shlex.quote(folder)} --iter {iteration}"
