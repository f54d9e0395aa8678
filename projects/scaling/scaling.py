"""Adapt the learning rates and lengths of a config to another number of workers or another batch size."""

import logging
from collections.abc import Mapping
from typing import Any

from trainkit.config import CfgNode
from trainkit.solver.build import base_lr
from trainkit.utils.errors import not_accepted

logger = logging.getLogger(__name__)

_SCHEDULE_LENGTHS = {"BEGIN", "END", "LENGTH", "STEP_SIZE", "MILESTONES", "PERIODS", "TIMESCALE"}


def scale_workers(cfg: CfgNode, num_workers: int) -> CfgNode:
    """Adapt a config for SOLVER.REFERENCE_WORLD_SIZE ranks to another number of ranks.

    Let r be ``num_workers`` divided by the reference. Batch size and learning rate are multiplied by r, and these
    lengths in iterations are divided by r, to at least 1 if they are not 0: MAX_ITER, WARMUP_ITERS (if it was set),
    STEPS, CHECKPOINT_PERIOD and MAX_BATCHES_PER_EPOCH of SOLVER, CHECKPOINT.START, EVAL_PERIOD and EVAL_START of TEST,
    and the arguments of trainkit's own schedules in SOLVER.SCHEDULES. This is the linear scaling rule of Goyal et al.,
    "Accurate, Large Minibatch SGD". Returns ``cfg`` itself if nothing changes, else a changed copy.
    """
    reference = cfg.SOLVER.REFERENCE_WORLD_SIZE
    if reference in (0, num_workers):
        return cfg
    scale, batch_size = num_workers / reference, cfg.SOLVER.IMS_PER_BATCH * num_workers
    if batch_size % reference:
        accepted = (
            f"for {num_workers} processes, a multiple of SOLVER.REFERENCE_WORLD_SIZE ({reference})"
        )
        raise not_accepted("SOLVER.IMS_PER_BATCH", cfg.SOLVER.IMS_PER_BATCH, accepted)

    def shorter(length: Any) -> Any:
        if isinstance(length, list | tuple):
            return type(length)(shorter(item) for item in length)
        # 0 switches off
        return length if isinstance(length, str) else round(length / scale) or int(length > 0)

    cfg = cfg.clone()  # items of a frozen node can be assigned
    solver = cfg.SOLVER
    lengths = {
        key: shorter(solver[key])
        for key in ("MAX_ITER", "WARMUP_ITERS", "STEPS", "CHECKPOINT_PERIOD")
    }
    if not solver.is_set("WARMUP_ITERS"):
        lengths["WARMUP_ITERS"] = solver.WARMUP_ITERS
    if batches := solver.get("MAX_BATCHES_PER_EPOCH", 0):  # a key of the project samplers
        solver["MAX_BATCHES_PER_EPOCH"] = shorter(batches)
    solver.update(lengths, IMS_PER_BATCH=batch_size // reference, REFERENCE_WORLD_SIZE=num_workers)
    cfg.TEST.update({key: shorter(cfg.TEST[key]) for key in ("EVAL_PERIOD", "EVAL_START")})
    cfg.CHECKPOINT["START"] = shorter(cfg.CHECKPOINT.START)
    _scale_lr(solver, scale)
    for entry in solver.get("SCHEDULES", []):
        entry.update({key: shorter(entry[key]) for key in _SCHEDULE_LENGTHS & entry.keys()})
        if entry["NAME"] == "Exponential" and "GAMMA" in entry:  # a factor per iteration
            entry["GAMMA"] **= scale
    text = "Config scaled from %d to %d workers: batch size %d, learning rate %g, %s iterations"
    logger.info(text, reference, num_workers, solver.IMS_PER_BATCH, solver.BASE_LR, solver.MAX_ITER)
    return cfg


def scale_lr_to_batch(cfg: CfgNode) -> CfgNode:
    """Multiply learning rates by the ratio of the samples per iteration to SOLVER.REFERENCE_BATCH_SIZE.

    Samples per iteration are IMS_PER_BATCH (over all ranks) * ACCUMULATION_STEPS. Returns ``cfg`` itself if nothing
    changes, else a changed copy.
    """
    reference, batch_size = (
        cfg.SOLVER.REFERENCE_BATCH_SIZE,
        cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATION_STEPS,
    )
    if reference in (0, batch_size):
        return cfg
    cfg = cfg.clone()
    _scale_lr(cfg.SOLVER, batch_size / reference)
    cfg.SOLVER["REFERENCE_BATCH_SIZE"] = batch_size
    text = "Learning rate scaled from %d to %d samples per iteration: SOLVER.BASE_LR is %g"
    logger.info(text, reference, batch_size, cfg.SOLVER.BASE_LR)
    return cfg


def _scale_lr(solver: CfgNode, scale: float) -> None:
    solver.update(BASE_LR=solver.BASE_LR * scale, BASE_LR_END=solver.BASE_LR_END * scale)
    if base_lr(solver)[0] == "SOLVER.OPTIMIZER.LR":
        solver.OPTIMIZER["LR"] *= scale
    entries = [
        entry for entries in solver.values() if isinstance(entries, list) for entry in entries
    ]
    for entry in entries:  # such as those of SCHEDULES
        for key in ("LR", "END_VALUE"):
            if isinstance(entry, Mapping) and entry.get(key) is not None:
                entry[key] *= scale  # type: ignore[index]
