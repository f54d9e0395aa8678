"""The summary at the end of a run."""

import contextlib
import re
from pathlib import Path
from typing import Any

from trainkit.checkpoint import CheckpointError
from trainkit.utils.periods import say_done
from trainkit.utils.run_folder import LOCK_FILE

ENDS = {"finished": "has finished", "stopped": "was stopped", "failed": "has failed"}  # by the status of the trainer


def summarize(trainer: Any) -> str:
    """The end of a `DefaultTrainer`'s run: progress, the ``summary()`` of each hook, the files, how to continue."""
    folder = Path(trainer.cfg.OUTPUT_DIR)
    files = sorted(path.name + "/" * path.is_dir() for path in folder.glob("[!.]*") if path.name != LOCK_FILE)
    between = [name for name in files if re.fullmatch(r"model_\d+\..+", name)][1:-1]
    if len(between) > 1:  # there may be hundreds of these checkpoints
        files = ["..." if name == between[0] else name for name in files if name not in between[1:]]
    reason, max_iter = trainer._early or ("", trainer.max_iter)
    lines = [f"The run {ENDS[trainer.status]} {say_done(trainer.iter, max_iter)}{reason and f', early: {reason}'}"]
    lines += filter(None, [hook.summary() for hook in trainer.hooks])
    lines.append(f"files in {folder}: {', '.join(files)}")
    if trainer.status != "finished":
        has_checkpoint = False
        with contextlib.suppress(CheckpointError, OSError):  # this error may be why the run failed
            has_checkpoint = trainer.checkpointer.has_checkpoint()
        go_on = "to go on: the same command with --resume, or trainer.train()"
        lines.append(go_on if has_checkpoint else "there is no checkpoint")
    return "\n  ".join(lines)
