#!/usr/bin/env python
"""The job of ``train_net.py`` as a plain loop, for people who prefer changing code to overriding methods.

There are no trainer and no hooks: ``train`` has the whole loop. With the same config it gives the same losses, bit for
bit. It cannot resume in the middle or run on several GPUs; use the trainer for that.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from trainkit.checkpoint import Checkpointer, PeriodicCheckpointer
from trainkit.config import CfgNode, ConfigError, get_cfg, import_modules, resolve_lengths
from trainkit.data import batches_per_epoch, build_test_loader, build_train_loader
from trainkit.engine import (
    default_argument_parser,
    default_setup,
    default_writers,
    user_errors_exit,
)
from trainkit.evaluation import build_evaluator, inference_on_dataset, print_csv_format
from trainkit.modeling import build_model
from trainkit.solver import build_lr_scheduler, build_optimizer
from trainkit.utils.device import move_to_device, resolve_device
from trainkit.utils.events import EventStorage

ROOT = Path(__file__).resolve().parents[1]

logger = logging.getLogger("trainkit.tools.plain_train_net")


def train(cfg: CfgNode, model: torch.nn.Module) -> dict[str, Any]:
    """Train ``model``, starting from its current weights; returns the results of the last evaluation."""
    model.train()
    optimizer = build_optimizer(cfg, model)
    data_loader = build_train_loader(cfg)
    cfg = resolve_lengths(cfg, batches_per_epoch(data_loader))
    scheduler = build_lr_scheduler(cfg, optimizer)
    max_iter, device = cfg.SOLVER.MAX_ITER, resolve_device(cfg.MODEL.DEVICE)
    checkpointer = PeriodicCheckpointer(
        Checkpointer(model, cfg.OUTPUT_DIR, optimizer=optimizer, scheduler=scheduler),
        cfg.SOLVER.CHECKPOINT_PERIOD,
        max_iter,
    )
    writers = default_writers(cfg.OUTPUT_DIR, max_iter, cfg.LOG.WRITERS, cfg.LOG.WINDOW)
    results: dict[str, Any] = {}

    with EventStorage() as storage:
        for iteration, batch in zip(range(max_iter), data_loader, strict=False):
            storage.iter = iteration
            losses = model(move_to_device(batch, device))
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            storage.put_scalars(
                total_loss=loss.item(), **{name: value.item() for name, value in losses.items()}
            )
            storage.put_scalar("lr", optimizer.param_groups[0]["lr"], smoothing_hint=False)
            optimizer.step()
            scheduler.step()

            done = iteration + 1
            checkpointer.step(iteration)
            if done == max_iter or (cfg.TEST.EVAL_PERIOD and done % cfg.TEST.EVAL_PERIOD == 0):
                results = evaluate(cfg, model)
                model.train()
            if done == max_iter or done % cfg.LOG.PERIOD == 0:
                for writer in writers:
                    writer.write()
        for writer in writers:
            writer.close()
    return results


def evaluate(cfg: CfgNode, model: torch.nn.Module) -> dict[str, Any]:
    """The results on each dataset of DATASETS.TEST."""
    results = {}
    for name in cfg.DATASETS.TEST:
        results[name] = inference_on_dataset(
            model, build_test_loader(cfg, name), build_evaluator(cfg, name)
        )
        logger.info("Results on %s:", name)
        print_csv_format(results[name])
    return results


def main(args: argparse.Namespace) -> dict[str, Any]:
    with user_errors_exit():
        cfg = get_cfg()
        cfg.merge_from_file(args.config_file or str(ROOT / "projects/digits/config.yaml"))
        cfg.merge_from_list(args.opts)
        if args.resume:
            raise ConfigError(
                "--resume is given, but the plain loop cannot resume; use tools/train_net.py"
            )
        default_setup(cfg, args)
        import_modules(cfg.IMPORTS)
        model = build_model(cfg)
        checkpointer = Checkpointer(model, cfg.OUTPUT_DIR)
        weights = cfg.MODEL.WEIGHTS or (
            checkpointer.get_checkpoint_file() if args.eval_only else ""
        )
        if args.eval_only and not weights:
            raise ConfigError(
                f"there is nothing to evaluate: no checkpoint in {cfg.OUTPUT_DIR}; set MODEL.WEIGHTS"
            )
        checkpointer.load(weights)
    return evaluate(cfg, model) if args.eval_only else train(cfg, model)


if __name__ == "__main__":
    sys.path += [str(ROOT), str(Path.cwd())]
    main(default_argument_parser().parse_args())
