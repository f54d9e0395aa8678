"""A short digits job by ``tools/train_net.py``, and what it leaves behind."""

import json
from pathlib import Path
from typing import Any

import torch

from tools import train_net
from trainkit.config import get_cfg
from trainkit.engine import default_argument_parser, default_setup
from trainkit.utils.logger import close_logger

MAX_ITER = 12  # four epochs of three iterations
OPTIONS = [
    *("SOLVER.MAX_ITER", MAX_ITER, "SOLVER.IMS_PER_BATCH", 400, "MODEL.WIDTH", 2, "TEST.IMS_PER_BATCH", 100),
    *("SOLVER.LR_SCHEDULER_NAME", "WarmupMultiStepLR", "SOLVER.STEPS", (), "SOLVER.WARMUP_ITERS", 0),
    *("SOLVER.CHECKPOINT_PERIOD", 4, "TEST.EVAL_PERIOD", 4, "CHECKPOINT.BEST_METRIC", ""),
    *("LOG.PERIOD", 1, "LOG.WINDOW", 1, "LOG.WRITERS", ["json"]),
    *("INPUT.TRAIN_TRANSFORM", "DigitsTransform"),  # the other one takes longer than all else
]


class Run:
    """The folder of a run, read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = (folder / "log.txt").read_text()
        self.rows = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
        self.files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def metric(self, name: str) -> dict[int, float]:
        """iteration -> value"""
        return {row["iteration"]: row[name] for row in self.rows if name in row}

    def checkpoint(self) -> dict[str, Any]:
        return torch.load(self.folder / "model_final.pth")


def _arguments(folder: Path, options: tuple[Any, ...], *flags: str) -> Any:
    return default_argument_parser().parse_args([*flags, *map(str, [*OPTIONS, "OUTPUT_DIR", folder, *options])])


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
