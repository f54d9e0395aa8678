"""What a run says at its end."""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from trainkit.engine.train_loop import HookBase, TrainerBase
from trainkit.utils.progress import is_notebook

ENDS = {"finished": "has finished", "stopped": "was stopped", "failed": "has failed"}  # by the status of the trainer


def summarize(trainer: TrainerBase, hooks: Iterable[HookBase], output_dir: str) -> str:
    """Some lines: how far it came, what hooks have to say (their ``summary()``), what there is now, how it goes on."""
    lines = [f"The run {ENDS[trainer.status]} after {trainer.iter} of {trainer.max_iter} iterations"]
    lines += [text for hook in hooks if hasattr(hook, "summary") and (text := hook.summary())]
    files = sorted(path.name + "/" * path.is_dir() for path in Path(output_dir).glob("*"))
    lines.append(f"files in {output_dir}: {', '.join(files)}")
    if trainer.status != "finished":
        lines.append(f"to go on: {_resume_command()}")
    return "\n  ".join(lines)


def _resume_command() -> str:
    if is_notebook():
        return "trainer.train()"
    script, *arguments = sys.argv
    # in front, since settings take the rest of a command line
    return shlex.join(["python", script, *(["--resume"] if "--resume" not in arguments else []), *arguments])
