"""Run by a test: a child of this process dies at each call of a save in turn, and this process resumes.

One line of JSON per death: what the child left and what is there after the resume.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from tests.checkpoint.conftest import Counter, linear, weight_of
from tests.checkpoint.faults import EACH_CALL, Faults
from trainkit.checkpoint import Checkpointer


def main(folder: Path, save_format: str) -> None:
    torch.set_num_threads(1)
    for kind, n in EACH_CALL:
        run = folder / f"{kind}_{n}"
        Checkpointer(linear(1), run, trainer=Counter(1)).save("model_0000001")
        child = os.fork()
        if child == 0:
            Faults(setattr, kind, n, lambda: os.kill(os.getpid(), signal.SIGKILL))
            checkpointer = Checkpointer(linear(2), run, format=save_format, trainer=Counter(2))
            checkpointer.save("model_0000002")
            checkpointer.wait()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        left = sum(name.endswith(".trainkit-tmp") for name in os.listdir(run))
        model, trainer = linear(0), Counter(0)
        Checkpointer(model, run, trainer=trainer).resume_or_load("", resume=True)
        print(
            json.dumps(
                {
                    "at": [kind, n],
                    "signal": os.WTERMSIG(status),
                    "left": left,
                    "resumed": [weight_of(model), trainer.value],
                    "files": sorted(name for name in os.listdir(run) if name[0] != "."),
                }
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
