"""A job of ten iterations for torchrun and ``launch``, that dies or fails where it is told to."""

import os
import signal
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # as a script it only finds what is beside it

from tests.engine.job import tiny_cfg  # noqa: E402
from trainkit.engine import (  # noqa: E402
    DefaultTrainer,
    HookBase,
    default_argument_parser,
    default_setup,
    is_restarted,
    launch,
)
from trainkit.engine.hooks import HOOK_REGISTRY  # noqa: E402
from trainkit.utils import comm  # noqa: E402


@HOOK_REGISTRY.register()
class KillFirstStart(HookBase):
    """SIGKILL to the last rank, in the first start of the run."""

    def __init__(self, iter: int) -> None:
        self._iter = iter

    def after_backward(self):
        is_last_rank = comm.get_rank() == comm.get_world_size() - 1
        if self.trainer.iter == self._iter and is_last_rank and not is_restarted():
            os.kill(os.getpid(), signal.SIGKILL)


def main(args):
    torch.set_num_threads(1)
    cfg = tiny_cfg("", *args.opts)
    default_setup(cfg, args)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


if __name__ == "__main__":
    arguments = default_argument_parser().parse_args()
    launch(main, arguments.num_gpus, args=(arguments,))
