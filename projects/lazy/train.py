"""Train or evaluate the job of a `LazyConfig`.

The config has ``model``, ``optimizer``, ``lr_multiplier``, ``dataloader`` and ``train``, as in
detectron2. It may leave out the keys ``val``, ``test`` and ``evaluator`` of ``dataloader``, and
``accumulation_steps``, ``seed``, ``init_checkpoint``, ``ddp`` and ``amp`` of ``train``.
"""

import argparse
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trainkit.projects.lazy.config import LazyConfig, instantiate

from trainkit.checkpoint import Checkpointer
from trainkit.config import ConfigError
from trainkit.engine import (
    AMPTrainer,
    SimpleTrainer,
    create_ddp_model,
    default_setup,
    default_writers,
    hooks,
    is_restarted,
    user_errors_exit,
)
from trainkit.evaluation import inference_on_dataset, print_csv_format
from trainkit.utils import comm
from trainkit.utils.device import resolve_device

FAST_DEV_RUN = [
    "train.max_iter=6",
    "train.eval_period=3",
    "train.checkpointer.period=3",
    "train.log_period=1",
]

logger = logging.getLogger(__name__)

BuildTrainer = Callable[[Any], tuple[SimpleTrainer, Checkpointer]]
"""Called with the config; returns the trainer with its hooks, and its checkpointer."""


def build_model(cfg: Any) -> nn.Module:
    """The model, on ``train.device``."""
    return instantiate(cfg.model).to(resolve_device(cfg.train.device))


def build_trainer(cfg: Any) -> tuple[SimpleTrainer, Checkpointer]:
    """The trainer with its hooks, and its checkpointer."""
    model = build_model(cfg)
    params = {**cfg.optimizer.params, "model": model}
    optimizer = instantiate({**cfg.optimizer, "params": params})
    data_loader = instantiate(cfg.dataloader.train)
    model = create_ddp_model(model, **cfg.train.get("ddp", {}))
    options: dict[str, Any] = {
        "accumulation_steps": cfg.train.get("accumulation_steps", 1),
        "async_write_metrics": resolve_device(cfg.train.device).type != "cpu",
    }
    amp = cfg.train.get("amp", {"enabled": False})
    trainer: SimpleTrainer
    if amp.get("enabled"):
        precision = getattr(torch, amp.get("precision", "float16"))
        trainer = AMPTrainer(model, data_loader, optimizer, precision=precision, **options)
    else:
        trainer = SimpleTrainer(model, data_loader, optimizer, **options)
    checkpointer = Checkpointer(model, cfg.train.output_dir, trainer=trainer)
    writers = []
    if comm.is_main_process():
        writers = default_writers(cfg.train.output_dir, cfg.train.max_iter)
    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
            hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer),
            *build_evaluation(cfg, model),
            hooks.PeriodicWriter(writers, cfg.train.log_period),
        ]
    )
    return trainer, checkpointer


def build_evaluation(cfg: Any, model: nn.Module) -> list[hooks.EvalHook]:
    """Hooks that evaluate "val" while training, and "test" once after it.

    Without "val", both is done with "test".
    """
    parts = [part for part in ("val", "test") if part in cfg.dataloader]
    if not parts or "evaluator" not in cfg.dataloader:
        logger.info(
            "Nothing is evaluated: the config has no dataloader.evaluator, or no data for it"
        )
        return []
    periodic = hooks.EvalHook(cfg.train.eval_period, partial(evaluate, cfg, model, parts[0]))
    if len(parts) == 1:
        return [periodic]
    return [periodic, hooks.FinalEvalHook(lambda: {"test": evaluate(cfg, model, "test")})]


def evaluate(cfg: Any, model: nn.Module, part: str) -> dict[str, Any]:
    """The results on a part of ``dataloader``, "val" or "test"."""
    evaluator = instantiate(cfg.dataloader.evaluator)
    results = inference_on_dataset(model, instantiate(cfg.dataloader[part]), evaluator, name=part)
    print_csv_format(results)
    return results


def run(
    args: argparse.Namespace,
    config_file: str | Path = "",
    build_trainer: BuildTrainer = build_trainer,
) -> dict[str, Any] | None:
    """Train, resume or evaluate a job, by the options of `default_argument_parser`.

    Every process calls it.

    Args:
        config_file: used if the command line names none.

    Returns:
        The results of ``--eval-only``, on rank 0.

    Raises:
        SystemExit: see `user_errors_exit`.
    """
    with user_errors_exit():
        cfg = setup(args, config_file)
        if args.eval_only:
            return evaluate_only(cfg)
        train(cfg, args.resume or is_restarted(), build_trainer)
    return None


def setup(args: argparse.Namespace, config_file: str | Path = "") -> Any:
    """Set up everything before training; returns the config with the command line's changes."""
    cfg = LazyConfig.apply_overrides(LazyConfig.load(args.config_file or config_file), args.opts)
    if args.fast_dev_run:
        output_dir = str(Path(cfg.train.output_dir) / "fast_dev_run")
        cfg = LazyConfig.apply_overrides(cfg, [*FAST_DEV_RUN, f"train.output_dir={output_dir!r}"])
    default_setup(cfg, args)
    return cfg


def train(cfg: Any, resume: bool, build_trainer: BuildTrainer = build_trainer) -> None:
    """Train from the start, or continue from the last checkpoint."""
    trainer, checkpointer = build_trainer(cfg)
    checkpointer.resume_or_load(cfg.train.get("init_checkpoint", ""), resume=resume)
    start_iter = trainer.next_iter
    if start_iter > cfg.train.max_iter:
        raise ConfigError(
            f"train.max_iter is {cfg.train.max_iter}, but the checkpoint has done {start_iter} "
            "iterations; raise it, or leave out --resume"
        )
    trainer.train(start_iter, cfg.train.max_iter)


def evaluate_only(cfg: Any) -> dict[str, Any]:
    """The results of train.init_checkpoint, or else of the last checkpoint, on the test data."""
    for part in ("test", "evaluator"):
        if part not in cfg.dataloader:
            raise ConfigError(f"there is nothing to evaluate: the config has no dataloader.{part}")
    model = build_model(cfg)
    weights = cfg.train.get("init_checkpoint", "")
    checkpointer = Checkpointer(model, cfg.train.output_dir, save_to_disk=False)
    if not weights and not checkpointer.has_checkpoint():
        raise ConfigError(
            f"there is nothing to evaluate: no checkpoint in {cfg.train.output_dir}; set "
            "train.init_checkpoint"
        )
    checkpointer.resume_or_load(weights, resume=not weights)
    checkpointer.check_complete()
    return evaluate(cfg, model, "test")
