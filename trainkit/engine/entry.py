"""A training script in one call."""

import argparse
from typing import Any

from trainkit.config import CfgNode, get_cfg
from trainkit.engine.defaults import DefaultTrainer
from trainkit.engine.evaluation_run import EvaluationRun
from trainkit.engine.setup import default_setup, user_errors_exit


def run(args: argparse.Namespace, trainer_class: type[DefaultTrainer], cfg: CfgNode | None = None) -> dict[str, Any]:
    """Train, resume, evaluate or try a job, by the options of `default_argument_parser`; every process calls it.

    Args:
        cfg: the settings of the job; None: the defaults. ``--config-file`` and ``KEY VALUE`` pairs are merged into a
            copy, unless the config is frozen.

    Returns:
        The results of the last evaluation, on rank 0.

    Raises:
        SystemExit: see `user_errors_exit`; with code 1 if the results differ from TEST.EXPECTED_RESULTS.
    """
    with user_errors_exit():
        cfg = get_cfg() if cfg is None else cfg.clone()
        if not cfg.is_frozen():
            if args.config_file:
                cfg.merge_from_file(args.config_file)
            cfg.merge_from_list(args.opts)
        cfg.freeze()
        default_setup(cfg, args)
        if args.eval_only:
            return EvaluationRun(cfg, trainer_class).run()
        trainer = trainer_class(cfg)
        trainer.resume_or_load(resume=args.resume)
        return trainer.train()
