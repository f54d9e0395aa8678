"""A short digits job by ``tools/train_net.py``, what it leaves behind, and a hook that stops it at an exact moment."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from tools import train_net
from trainkit.config import get_cfg
from trainkit.engine import HookBase, default_argument_parser, default_setup
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.utils import comm
from trainkit.utils.logger import close_logger

MAX_ITER = 12  # four epochs of three iterations
OPTIONS = [
    *(
        "SOLVER.MAX_ITER",
        MAX_ITER,
        "SOLVER.IMS_PER_BATCH",
        400,
        "MODEL.WIDTH",
        2,
        "TEST.IMS_PER_BATCH",
        100,
    ),
    *(
        "SOLVER.LR_SCHEDULER_NAME",
        "WarmupMultiStepLR",
        "SOLVER.STEPS",
        (),
        "SOLVER.WARMUP_ITERS",
        0,
    ),
    *("SOLVER.CHECKPOINT_PERIOD", 4, "TEST.EVAL_PERIOD", 4, "CHECKPOINT.BEST_METRIC", ""),
    *("LOG.PERIOD", 1, "LOG.WINDOW", 1, "LOG.WRITERS", ["json"]),
    *("INPUT.TRAIN_TRANSFORM", "DigitsTransform"),  # the other one takes longer than all else
]


class Run:
    """The folder of a run, read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = (folder / "log.txt").read_text()
        self.rows = [
            json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()
        ]
        self.files = sorted(
            str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
        )

    def metric(self, name: str) -> dict[int, float]:
        """iteration -> value"""
        return {row["iteration"]: row[name] for row in self.rows if name in row}

    def checkpoint(self) -> dict[str, Any]:
        return torch.load(self.folder / "model_final.pth")


def _arguments(folder: Path, options: tuple[Any, ...], *flags: str) -> Any:
    return default_argument_parser().parse_args(
        [*flags, *map(str, [*OPTIONS, "OUTPUT_DIR", folder, *options])]
    )


def in_one_piece(folder: Path, *options: Any) -> Run:
    """One call of the tool."""
    train_net.main(_arguments(folder, options))
    close_logger()
    return Run(folder)


def in_pieces(folder: Path, *options: Any) -> Run:
    """Two ``train()`` calls of one trainer, then one of a second trainer that resumes."""
    args, cfg = _arguments(folder, options), get_cfg()
    cfg.merge_from_file(train_net.DEFAULT_CONFIG)
    cfg.merge_from_list(args.opts)
    default_setup(cfg, args)
    trainer = train_net.Trainer(cfg)
    trainer.train(max_iter=4)
    trainer.train(max_iter=8)
    close_logger()
    train_net.main(_arguments(folder, options, "--resume"))
    close_logger()
    return Run(folder)


@HOOK_REGISTRY.register()
class SendSignal(HookBase):
    """Send a signal from the last rank: in a step, or in an evaluation."""

    def __init__(
        self, signum: str, iter: int, in_evaluation: bool = False, to_launcher: bool = False
    ) -> None:
        self._signum, self._iter, self._in_evaluation = signal.Signals[signum], iter, in_evaluation
        self._process = os.getppid() if to_launcher else os.getpid()

    def after_backward(self) -> None:
        self._send(in_evaluation=False)

    def before_eval_step(self, phase: str, index: int, inputs: Any) -> None:
        if index == 0:
            self._send(in_evaluation=True)

    def _send(self, in_evaluation: bool) -> None:
        is_last_rank = comm.get_rank() == comm.get_world_size() - 1
        if (
            is_last_rank
            and self.trainer.iter == self._iter
            and in_evaluation == self._in_evaluation
        ):
            os.kill(self._process, self._signum)
