#!/usr/bin/env python
"""Train or evaluate the job of a config; without arguments, the digits.

A project that needs more copies this file and subclasses ``DefaultTrainer`` in it.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from trainkit.config import CfgNode, get_cfg
from trainkit.engine import (
    DefaultTrainer,
    EvaluationRun,
    default_argument_parser,
    default_setup,
    fast_dev_config,
    launch,
    user_errors_exit,
)

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_CONFIG = ROOT / "projects/digits/config.yaml"

logger = logging.getLogger("trainkit.tools.train_net")


class Trainer(DefaultTrainer):
    """The place for ``build_*`` methods of your own."""


def setup(args: argparse.Namespace) -> CfgNode:
    """The config of the command line, and everything that has to be set up before training."""
    cfg = get_cfg()
    cfg.merge_from_file(args.config_file or str(DEFAULT_CONFIG))
    cfg.merge_from_list(args.opts)
    if args.fast_dev_run:
        cfg = fast_dev_config(cfg)
    cfg.freeze()
    default_setup(cfg, args)
    return cfg


def main(args: argparse.Namespace) -> dict[str, Any]:
    """One process of the run; returns the results of the last evaluation on rank 0."""
    with user_errors_exit():
        cfg = setup(args)
        if args.eval_only:
            return EvaluationRun(cfg, Trainer).run()
        trainer = Trainer(cfg)
        trainer.resume_or_load(resume=args.resume)
        results = trainer.train()
        if args.fast_dev_run:
            Trainer(cfg).resume_or_load(resume=True)
            logger.info("The trial run was trained, evaluated, saved and loaded without an error")
    return results


def invoke_main() -> None:
    """The command line."""
    args = default_argument_parser().parse_args()
    # projects, and modules in the current folder, can be named in IMPORTS
    sys.path += [str(ROOT), str(Path.cwd())]
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))


if __name__ == "__main__":
    invoke_main()
