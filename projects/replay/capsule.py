"""The capsule: a file with a step that has failed, and the command that repeats the step."""

import contextlib
import logging
import os
import re
import shlex
import traceback
from collections.abc import Mapping
from typing import Any

from trainkit.projects.replay.origin import command_of

from trainkit.checkpoint.file import write_file
from trainkit.checkpoint.state import plain_state
from trainkit.config import ConfigError
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model

logger = logging.getLogger(__name__)

REPLAY = "python -m trainkit.projects.replay"

# saving the first would cost time in each step; the second is as large as the model
_NOTES = [
    "random state and buffers are those after the forward pass that has failed",
    "the optimizer has no momentum, so its update is another one",
]


def leave_capsule(trainer: Any, error: BaseException, origin: Mapping[str, Any]) -> str:
    """Write the capsule of a failed step of a `DefaultTrainer`; it replaces the capsule of an earlier failure.

    If the weights may have been updated since, or a file cannot hold the batch, the capsule holds no step. It then
    holds how the run was started (``origin``) and what it has logged since its last checkpoint. Returns the command
    that repeats the step; "" if there is no step to repeat.
    """
    inside = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    named = failed_iteration(error)  # the trainer may be in a later one
    is_of_step = trainer.position.stage == 1 and bool({"run_step", "before_step"} & inside)
    if isinstance(error, ConfigError) or not isinstance(error, Exception) or not (is_of_step or named is not None):
        return ""
    iteration = trainer.iter if named is None else named
    is_file = origin["module"] or os.path.isfile(origin["argv"][0])  # not python -c, nor a program from stdin
    command = command_of(origin) if is_file else "and the command of the run"
    commands = [f"{_replay_of_run(trainer)} --iter {iteration} -- {command}"]
    # of several micro-batches, or with logical ranks, this process has only one batch of the step
    is_whole = trainer.accumulation_steps == 1 and not trainer.cfg.SOLVER.get("LOGICAL_RANKS")
    is_whole = is_whole and is_of_step and iteration == trainer.iter and "update" not in inside
    # not .pth, so that no run resumes from it
    path = os.path.abspath(os.path.join(trainer.cfg.OUTPUT_DIR, f"capsule.rank{comm.get_rank()}.pt"))
    try:
        state = _contents(trainer, error, commands[0], is_whole)
        write_file({**state, "trainer": {**state["trainer"], "world_size": 1, "origin": origin}}, path)
        if state["capsule"]["batches"]:
            commands.insert(0, f"{REPLAY} {shlex.quote(path)} -- {command}")
    except Exception as other:
        logger.warning("The capsule of the failed step is not written: %s: %s", type(other).__name__, other)
    return ", or from the checkpoint: ".join(commands)


def failed_iteration(error: BaseException) -> int | None:
    """The iteration that an error about values that are not finite names; None: another error."""
    found = re.search(r"not finite in iteration (\d+)", str(error)) if isinstance(error, FloatingPointError) else None
    return int(found[1]) if found else None


def _contents(trainer: Any, error: Exception, command: str, is_whole: bool) -> dict[str, Any]:
    """A checkpoint without the optimizer's state (momentum), plus the batch and the failure."""
    batches, losses = list[Any](), dict[str, Any]()
    if is_whole:
        with contextlib.suppress(RuntimeError, TypeError):  # there is no batch yet, or a file cannot hold it
            batches.append(plain_state(trainer.batch))
            losses = trainer.losses
    state = trainer.state_dict()
    state["_trainer"]["optimizer"] = {**state["_trainer"]["optimizer"], "state": {}}
    names_of_last: Any = getattr(trainer.data_loader, "names_of_last", lambda num: [])
    failure = {
        "iteration": trainer.iter,
        "rank": comm.get_rank(),
        "batches": batches,
        "samples": names_of_last(1) if batches else [],
        "losses": {name: float(loss) for name, loss in losses.items()},
        "error": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "notes": _NOTES,
        "command": command,
    }
    others = {key: obj.state_dict() for key, obj in trainer.checkpointer.checkpointables.items() if key != "trainer"}
    model = unwrap_model(trainer.model).state_dict() if batches else {}
    return {"model": model, **others, "trainer": state, "capsule": failure}


def _replay_of_run(trainer: Any) -> str:
    world_size = 1 if trainer.cfg.SOLVER.get("LOGICAL_RANKS") else comm.get_world_size()
    start = f"torchrun --nproc-per-node {world_size} -m " if world_size > 1 else "python -m "
    folder = os.path.abspath(trainer.checkpointer.save_dir)
    return f"{REPLAY.replace('python -m ', start)} {shlex.quote(folder)}"
