"""The hook of every run: its checkpoints say how it was started, and a failed step leaves a capsule.

A capsule is a file with a step that has failed, and the command that repeats the step.
"""

import logging
import os
import shlex
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Any

from torch import Tensor
from trainkit.projects.replay import origin as facts
from trainkit.projects.replay.failure import describe_error, failed_iteration, losses_of
from trainkit.projects.replay.fork import adapt

from trainkit.checkpoint.file import ordinary, plain_state, write_file
from trainkit.config import ConfigError
from trainkit.engine.hook_base import HookBase
from trainkit.utils import comm
from trainkit.utils.device import device_of, unwrap_model

logger = logging.getLogger(__name__)

REPLAY = "python -m trainkit.projects.replay"


class RunRecord(HookBase):
    """Puts the origin of a run, see `describe_origin`, into its checkpoints; warns if a resumed run has other settings.

    If the run is a fork, it gets the adapted state of its parent, and its origin names its parents.
    """

    priority = 101  # last: its line about a failure is the last one of the hooks

    def __init__(self) -> None:
        # the runs from which this one was forked, the oldest first
        self._parents: list[dict[str, Any]] = []
        self._how_to_repeat = ""

    @cached_property
    def origin(self) -> dict[str, Any]:
        return facts.describe_origin(self.trainer.given_cfg.dump(), device_of(self.trainer.model))

    @property
    def _is_in_parts(self) -> bool:
        checkpoint_format = getattr(self.trainer.checkpointer, "format", None)
        return bool(getattr(checkpoint_format, "collective", False))

    def before_train(self) -> None:
        fork = self.trainer.cfg.get("FORK")
        if fork is not None and fork.RUN and not self._parents:
            raise ConfigError(
                "--fork is given (FORK.RUN), but the script starts at iteration 0; "
                "before train(), call trainer.resume_or_load(resume=args.resume)"
            )
        self._how_to_repeat = ""
        if comm.is_main_process():
            _ = self.origin  # read now: files may change during the run
        if self._is_in_parts:
            logger.info(
                "A step of this run cannot be repeated: its checkpoints are in parts, one of "
                "each rank"
            )

    def before_save(self, state: dict[str, Any]) -> None:
        if isinstance(state.get("trainer"), dict):
            state["trainer"]["origin"] = self._full_origin() if comm.is_main_process() else {}

    def _full_origin(self) -> dict[str, Any]:
        """The origin, with what is true only now: the files of the last samples, where their names are paths."""
        samples: list[str] = []
        try:  # a dataset's own `sample_name`
            samples = self._names_of_last_files()
        except Exception as error:
            logger.warning(
                "The files of the last samples are not recorded: %s: %s",
                type(error).__name__,
                error,
            )
        return {
            **self.origin,
            "samples": facts.sizes_and_times(samples),
            "saved_ns": time.time_ns(),
            "parents": [*self._parents],
        }

    def _names_of_last_files(self) -> list[str]:
        """The names of the last 1,000 samples, if they are files."""
        newest = [*chain(*_names_of_last(self.trainer, 1))]
        if not newest or not os.path.isfile(newest[-1]):
            return []
        num_batches = 1 + 1000 // len(newest)
        names = [*chain(*_names_of_last(self.trainer, num_batches))]
        return names[-1000:]

    def after_load(self, state: dict[str, Any]) -> None:
        trainer = state.get("trainer")
        if not isinstance(trainer, dict) or not isinstance(trainer.get("hooks"), dict):
            return  # it is not the file of a DefaultTrainer
        if not trainer.get("origin"):
            return
        fork = self.trainer.cfg.get("FORK")
        parents = trainer["origin"].get("parents", [])
        known = [(parent["run"], parent["iteration"]) for parent in parents]
        if fork is not None and fork.RUN and (fork.RUN, fork.ITER) not in known:
            adapt(trainer, self.trainer)
        # so it gets this as its state, if it loads one
        trainer["hooks"]["RunRecord"] = trainer["origin"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._parents = state_dict.get("parents", [])
        if "facts" not in state_dict:
            return
        table = facts.table_of_other_settings(state_dict, self.trainer.given_cfg)
        if table:
            logger.warning("The checkpoint was written with other settings:\n%s", table)

    def after_failure(self, error: BaseException) -> None:
        if not self._is_in_parts:
            self._how_to_repeat = leave_capsule(self.trainer, error, self._full_origin())

    def after_train(self) -> None:
        if self._how_to_repeat:
            # the commands stand in lines of their own, which can be copied
            logger.error("To repeat the step:\n  %s", self._how_to_repeat)


def _names_of_last(trainer: Any, num_batches: int) -> list[list[str]]:
    """The names of the samples of the last batches, if the loader of the trainer knows them."""
    loader = trainer.data_loader
    if not hasattr(loader, "names_of_last"):
        return []
    names: list[list[str]] = loader.names_of_last(num_batches)
    return names


def leave_capsule(trainer: Any, error: BaseException, origin: Mapping[str, Any]) -> str:
    """Write the capsule of a failed step of a `DefaultTrainer`; it replaces the capsule of an earlier failure.

    It is a checkpoint without the optimizer's state (momentum), plus the batch and the failure. If the weights may have
    been updated since, or a file cannot hold the batch, it holds no step, but how the run was started (``origin``) and
    what was logged since the last checkpoint. Returns the command that repeats the step; "" if there is no such step.
    """
    functions = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    is_in_step = "run_step" in functions or "before_step" in functions
    is_of_step = trainer.done == trainer.iter and is_in_step
    is_of_loss = isinstance(error, FloatingPointError) and "not finite in iteration" in str(error)
    is_fault_of_run = isinstance(error, Exception) and not isinstance(error, ConfigError)
    if not is_fault_of_run or not (is_of_step or is_of_loss):
        return ""
    iteration = failed_iteration(error, trainer.iter)  # the trainer may be in a later one
    is_present = is_of_step and iteration == trainer.iter
    has_logical_ranks = bool(trainer.cfg.SOLVER.get("LOGICAL_RANKS"))
    num_ranks = 1 if has_logical_ranks else comm.get_world_size()
    folder = os.path.abspath(trainer.checkpointer.save_dir)
    from_checkpoint = _call(origin, folder, iteration, num_ranks)
    # not .pth, so that no run resumes from it
    name = f"capsule.rank{comm.get_rank()}.pt"
    path = os.path.abspath(os.path.join(trainer.cfg.OUTPUT_DIR, name))
    capsule: dict[str, Any] = {
        "iteration": iteration,
        "error": describe_error(error),
        "command": from_checkpoint,
        "batches": [],
        "samples": [],
        "losses": {},
    }
    try:
        # of several micro-batches, or with logical ranks, this process has only one batch of the step
        has_whole_batch = trainer.accumulation_steps == 1 and not has_logical_ranks
        if is_present and has_whole_batch and "update" not in functions:
            with suppress(AttributeError, TypeError):  # there is none, or a file cannot hold it
                batch = plain_state(trainer.batch, take=_copy)
                capsule |= {"batches": [batch], "samples": _names_of_last(trainer, 1)}
        # with logical ranks they depend on the number of processes
        if is_present and not has_logical_ranks:
            with suppress(AttributeError):  # there are none yet
                capsule["losses"] = losses_of(trainer)
        _write_capsule(trainer, capsule, origin, path, folder)
    except Exception as other:
        logger.warning(
            "The capsule of the failed step is not written: %s: %s", type(other).__name__, other
        )
        return from_checkpoint
    if not capsule["batches"]:
        return from_checkpoint
    return f"{_call(origin, path)}\nor from the checkpoint:\n  {from_checkpoint}"


def _copy(tensor: Tensor, path: str) -> Tensor:
    """A file would hold the whole memory of a tensor of which a sample is a part."""
    return ordinary(tensor, path).clone()


def _write_capsule(
    trainer: Any, capsule: dict[str, Any], origin: Mapping[str, Any], path: str, folder: str
) -> None:
    """Write the capsule, and without its step into the folder of the checkpoints, if that is another one."""
    state: dict[str, Any] = {}
    for key, value in trainer.checkpointer.checkpointables.items():
        state[key] = value.state_dict()
    step = state["trainer"]["_trainer"]
    step["optimizer"] = {**step["optimizer"], "state": {}}
    state["trainer"] |= {"world_size": 1, "origin": origin}
    model = unwrap_model(trainer.model).state_dict() if capsule["batches"] else {}
    write_file({"model": model, **state, "capsule": capsule}, path)
    if folder != os.path.dirname(path):  # a replay of the checkpoints compares the failure too
        without_step = {**capsule, "batches": [], "samples": []}
        beside = os.path.join(folder, os.path.basename(path))
        write_file({"model": {}, **state, "capsule": without_step}, beside)


def _call(origin: Mapping[str, Any], path: str, iteration: int | None = None, num: int = 1) -> str:
    """What repeats a step from a capsule, or from the checkpoints of a run of ``num`` processes."""
    if origin["has_file"]:
        start = REPLAY
        if num > 1:
            start = REPLAY.replace("python", f"torchrun --nproc-per-node {num}")
        step = "" if iteration is None else f" --iter {iteration}"
        return f"{start} {shlex.quote(path)}{step} -- {facts.command_of(origin)}"
    if num > 1:
        return f"put the code of the run into a file, which torchrun starts, and replay {path!r}"
    call = f"trainkit.projects.replay.replay({path!r}, {iteration}, main)"
    return f"{call} in Python, with a function main() that does what the run has done"
