"""The summary at the end of a run."""

import contextlib
import logging
import multiprocessing
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from trainkit.checkpoint import CheckpointError
from trainkit.engine.hook_base import HookBase
from trainkit.engine.setup import command_of
from trainkit.utils.periods import say_done
from trainkit.utils.run_folder import LOCK_FILE

logger = logging.getLogger(__name__)

ENDS = {"finished": "has finished", "stopped": "was stopped", "failed": "has failed"}  # by the status of the trainer

_PERIODIC = re.compile(r"model_\d+\..+")  # there may be hundreds of these checkpoints


def summarize(trainer: Any) -> str:
    """The end of a `DefaultTrainer`'s run: progress, the ``summary()`` of each hook, the files, how to continue."""
    cfg = trainer.cfg
    lines = [f"The run {ENDS[trainer.status]} {say_done(trainer.iter, trainer.max_iter)}"]
    lines += filter(None, map(_summary_of, trainer.hooks))
    paths = [path for path in Path(cfg.OUTPUT_DIR).glob("*") if path.name != LOCK_FILE and path.name[0] != "."]
    files = sorted(path.name + "/" * path.is_dir() for path in paths)
    lines.append(f"files in {cfg.OUTPUT_DIR}: {', '.join(_shortened(files))}")
    if trainer.status != "finished":
        has_checkpoint = False
        with contextlib.suppress(CheckpointError, OSError):  # this error may be why the run failed
            has_checkpoint = trainer.checkpointer.has_checkpoint()
        how = _how_to_go_on(command_of(cfg).resume)
        lines.append(f"to go on: {how}" if has_checkpoint else "there is no checkpoint")
    return "\n  ".join(lines)


def _summary_of(hook: HookBase) -> str:
    try:
        return hook.summary()
    except Exception:  # this error must not hide how the run has ended
        logger.exception("%s.summary() has failed, so its line is left out:", type(hook).__name__)
        return ""


def _shortened(files: list[str]) -> list[str]:
    """Replace the periodic checkpoints between the first and the last by "..."."""
    between = [name for name in files if _PERIODIC.fullmatch(name)][1:-1]
    if len(between) > 1:
        files = ["..." if name == between[0] else name for name in files if name not in between[1:]]
    return files


def _how_to_go_on(resumes: bool | None) -> str:
    """How to continue; ``resumes``: whether the command line has --resume, None if the script has no such option."""
    if type(sys.stdout).__module__.startswith("ipykernel"):
        return "trainer.train()"
    if resumes is None:
        return "build the trainer again, resume_or_load(resume=True), train()"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "the same torchrun command" + ("" if resumes else ", with --resume after the script")
    arguments = sys.argv[1:]
    if multiprocessing.parent_process() is None:
        head = ["python", *sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]]  # -m and the module, or a script
    else:  # in a spawned process, sys.orig_argv is not the user's command
        head = ["python", *sys.argv[:1]]
    # --resume first, since settings may take the rest of the command line
    return shlex.join([*head, *([] if resumes else ["--resume"]), *arguments])
