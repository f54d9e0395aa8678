"""Adapt the learning rates and lengths of a config to another number of workers or another batch size."""

import logging
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
    scale = num_workers / reference
    batch_size, rest = divmod(cfg.SOLVER.IMS_PER_BATCH * num_workers, reference)
    if rest != 0:
        accepted = (
            f"for {num_workers} processes, a multiple of SOLVER.REFERENCE_WORLD_SIZE ({reference})"
        )
        raise not_accepted("SOLVER.IMS_PER_BATCH", cfg.SOLVER.IMS_PER_BATCH, accepted)

    def shorter(length: Any) -> Any:
        if isinstance(length, list | tuple):
            return type(length)(shorter(item) for item in length)
        if isinstance(length, str):
            return length
        # 0 would switch off
        scaled = round(length / scale)
        return 1 if scaled == 0 and length > 0 else scaled

    cfg = cfg.clone()
    solver = cfg.SOLVER
    # by item, since the node may be frozen
    for key in ("MAX_ITER", "STEPS", "CHECKPOINT_PERIOD"):
        solver[key] = shorter(solver[key])
    if solver.is_set("WARMUP_ITERS"):
        solver["WARMUP_ITERS"] = shorter(solver.WARMUP_ITERS)
    if "MAX_BATCHES_PER_EPOCH" in solver:  # a key of the project samplers
        solver["MAX_BATCHES_PER_EPOCH"] = shorter(solver.MAX_BATCHES_PER_EPOCH)
    solver["IMS_PER_BATCH"] = batch_size
    solver["REFERENCE_WORLD_SIZE"] = num_workers
    for key in ("EVAL_PERIOD", "EVAL_START"):
        cfg.TEST[key] = shorter(cfg.TEST[key])
    cfg.CHECKPOINT["START"] = shorter(cfg.CHECKPOINT.START)
    _scale_lr(solver, scale)
    for entry in solver.get("SCHEDULES", []):
        for key in _SCHEDULE_LENGTHS & entry.keys():
            entry[key] = shorter(entry[key])
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
    reference = cfg.SOLVER.REFERENCE_BATCH_SIZE
    batch_size = cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATION_STEPS
    if reference in (0, batch_size):
        return cfg
    cfg = cfg.clone()
    _scale_lr(cfg.SOLVER, batch_size / reference)
    cfg.SOLVER["REFERENCE_BATCH_SIZE"] = batch_size
    text = "Learning rate scaled from %d to %d samples per iteration: SOLVER.BASE_LR is %g"
    logger.info(text, reference, batch_size, cfg.SOLVER.BASE_LR)
    return cfg


def _scale_lr(solver: CfgNode, scale: float) -> None:
    solver["BASE_LR"] *= scale
    solver["BASE_LR_END"] *= scale
    key_of_base, *_ = base_lr(solver)
    if key_of_base == "SOLVER.OPTIMIZER.LR":
        solver.OPTIMIZER["LR"] *= scale
    for entries in solver.values():
        if isinstance(entries, list):  # such as that of SCHEDULES
            for entry in entries:
                _scale_entry(entry, scale)


def _scale_entry(entry: Any, scale: float) -> None:
    if not isinstance(entry, dict):
        return
    for key in ("LR", "END_VALUE"):
        if entry.get(key) is not None:
            entry[key] *= scale
