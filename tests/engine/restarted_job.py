"""A job of ten iterations for torchrun and ``launch``, that dies or fails where it is told to."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

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
from trainkit.modeling import MODEL_REGISTRY  # noqa: E402
from trainkit.utils import comm  # noqa: E402


@MODEL_REGISTRY.register()
class TinyMLP(nn.Module):
    """Two classes of 4 numbers, without batch norm and dropout: the number of ranks makes no difference."""

    def __init__(self, cfg):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, batch):
        logits = self.layers(batch["x"])
        return {"loss_cls": nn.functional.cross_entropy(logits, batch["label"])} if self.training else logits


@HOOK_REGISTRY.register()
class NoteSamples(HookBase):
    """One line per iteration: its number and the samples of this rank, by the micro-batches."""

    def __init__(self, folder: str) -> None:
        self._folder, self._batches = folder, []

    def before_train(self):
        def note(model, inputs):
            if model.training:
                self._batches.append([round(x, 4) for x in inputs[0]["x"][:, 0].tolist()])

        self._handle = self.trainer.model.register_forward_pre_hook(note)

    def after_step(self):
        with open(f"{self._folder}/samples{comm.get_rank()}_of_{comm.get_world_size()}", "a") as file:
            print(self.trainer.iter, self._batches, file=file)
        self._batches.clear()


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
