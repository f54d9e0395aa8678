"""A config for another number of workers, or another batch size, than the one it was made for."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainkit.config.config import CfgNode
from trainkit.config.defaults import get_cfg
from trainkit.config.errors import ConfigError

logger = logging.getLogger(__name__)

_SCHEDULE_LENGTHS = {"BEGIN", "END", "LENGTH", "STEP_SIZE", "MILESTONES", "PERIODS", "TIMESCALE", "WARMUP", "DECAY"}


def optimizer_argument(solver: CfgNode, name: str) -> tuple[str, Any]:
    """The key that gives an argument of the optimizer, and its value: one of SOLVER.OPTIMIZER wins over one of SOLVER.

    Args:
        name: such as LR, which SOLVER calls BASE_LR.
    """
    key = "BASE_LR" if name == "LR" else name
    own = None if isinstance(solver.OPTIMIZER, str) else solver.OPTIMIZER.get(name)  # text: its name
    return (f"SOLVER.{key}", solver.get(key)) if own is None else (f"SOLVER.OPTIMIZER.{name}", own)


def scale_workers(cfg: CfgNode, num_workers: int) -> CfgNode:
    """Adapt a config that was made for SOLVER.REFERENCE_WORLD_SIZE ranks to another number of them.

    Batch size and learning rate are multiplied by the ratio of the numbers, lengths and periods in iterations are
    divided by it (lengths in epochs are right as they are): the linear scaling rule of Goyal et al.,
    "Accurate, Large Minibatch SGD". In SOLVER.SCHEDULES that goes for what trainkit's own schedules take. Inactive if
    the reference is 0 or the number itself. A default WARMUP_ITERS gets no longer than the run; it stays as it is if
    the run is given in epochs.

    Returns:
        ``cfg`` itself if inactive, else a changed copy, whose reference is ``num_workers``.
    """
    reference = cfg.SOLVER.REFERENCE_WORLD_SIZE
    if reference in (0, num_workers):
        return cfg
    scale = num_workers / reference
    batch_size = cfg.SOLVER.IMS_PER_BATCH * num_workers
    if batch_size % reference:
        raise ConfigError(
            f"SOLVER.IMS_PER_BATCH {cfg.SOLVER.IMS_PER_BATCH} for {reference} workers does not scale to {num_workers}: "
            "make it a multiple of SOLVER.REFERENCE_WORLD_SIZE"
        )

    def shorter(length: Any) -> Any:
        if isinstance(length, list | tuple):
            return type(length)(shorter(item) for item in length)
        return length if isinstance(length, str) else round(length / scale)

    with _changed(cfg) as cfg:
        solver, warmup_iters = cfg.SOLVER, cfg.SOLVER.WARMUP_ITERS
        solver.IMS_PER_BATCH = batch_size // reference
        _scale_lr(solver, scale)
        for key in ("MAX_ITER", "WARMUP_ITERS", "STEPS", "CHECKPOINT_PERIOD"):
            solver[key] = shorter(solver[key])
        if warmup_iters == get_cfg().SOLVER.WARMUP_ITERS:  # nobody has chosen it for this run
            if not isinstance(solver.MAX_ITER, str):
                warmup_iters = min(solver.WARMUP_ITERS, solver.MAX_ITER - solver.RESCALE_INTERVAL)
            solver.WARMUP_ITERS = warmup_iters
        for entry in solver.SCHEDULES:
            for key, value in entry.items():
                if key in _SCHEDULE_LENGTHS:
                    entry[key] = shorter(value)
                elif key == "GAMMA" and entry["NAME"] == "Exponential":  # that of one iteration
                    entry[key] = value**scale
        cfg.TEST.EVAL_PERIOD = shorter(cfg.TEST.EVAL_PERIOD)
        solver.REFERENCE_WORLD_SIZE = num_workers
    logger.info(
        "Config scaled from %d to %d workers: batch size %d, learning rate %g, %s iterations",
        *(reference, num_workers, solver.IMS_PER_BATCH, solver.BASE_LR, solver.MAX_ITER),
    )
    return cfg


def scale_lr_to_batch(cfg: CfgNode) -> CfgNode:
    """Adapt learning rates that were made for SOLVER.REFERENCE_BATCH_SIZE samples per iteration to those there are.

    They are multiplied by IMS_PER_BATCH * ACCUMULATION_STEPS / REFERENCE_BATCH_SIZE (IMS_PER_BATCH is over all ranks);
    nothing else changes. Inactive if the reference is 0 or the number itself.

    Returns:
        ``cfg`` itself if inactive, else a changed copy, whose reference is the number there is.
    """
    reference, batch_size = cfg.SOLVER.REFERENCE_BATCH_SIZE, cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATION_STEPS
    if reference in (0, batch_size):
        return cfg
    with _changed(cfg) as cfg:
        _scale_lr(cfg.SOLVER, batch_size / reference)
        cfg.SOLVER.REFERENCE_BATCH_SIZE = batch_size
    logger.info(
        "Learning rate scaled from %d to %d samples per iteration: SOLVER.BASE_LR is %g",
        *(reference, batch_size, cfg.SOLVER.BASE_LR),
    )
    return cfg


def split_batch(cfg: CfgNode, num_workers: int, present: int) -> CfgNode:
    """Divide the batch of an iteration that was divided for ``num_workers`` ranks over ``present`` ones.

    Each rank gets as many samples per forward as before, and ACCUMULATION_STEPS makes up for the ranks, so that
    IMS_PER_BATCH * ACCUMULATION_STEPS stays as it is, and learning rates and lengths with it. Where that does not come
    out even, both stay as they are. Inactive if the numbers are equal.

    Returns:
        ``cfg`` itself if nothing changes, else a changed copy.

    Raises:
        ConfigError: ``present`` ranks cannot share the batch.
    """
    solver = cfg.SOLVER
    samples = solver.IMS_PER_BATCH * solver.ACCUMULATION_STEPS
    if num_workers == present or solver.IMS_PER_BATCH % num_workers:
        return cfg
    batch_size = solver.IMS_PER_BATCH // num_workers * present
    if samples % batch_size:
        batch_size = next((size for size in (solver.IMS_PER_BATCH, samples) if size % present == 0), 0)
        if not batch_size:
            fitting = [number for number in range(1, samples + 1) if samples % number == 0]
            raise ConfigError(
                f"this run started with {num_workers} processes, and {present} cannot share its {samples} samples per "
                f"iteration (SOLVER.IMS_PER_BATCH {solver.IMS_PER_BATCH}, ACCUMULATION_STEPS "
                f"{solver.ACCUMULATION_STEPS}); go on with {', '.join(map(str, fitting))} processes, or set another "
                "SOLVER.IMS_PER_BATCH"
            )
    logger.warning(
        "This run started with %d processes, now there are %d: SOLVER.IMS_PER_BATCH is %d and ACCUMULATION_STEPS %d "
        "instead of %d and %d, which keeps the %d samples per iteration",
        *(num_workers, present, batch_size, samples // batch_size),
        *(solver.IMS_PER_BATCH, solver.ACCUMULATION_STEPS, samples),
    )
    if batch_size == solver.IMS_PER_BATCH:
        return cfg
    with _changed(cfg) as cfg:
        cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.ACCUMULATION_STEPS = batch_size, samples // batch_size
    return cfg


@contextmanager
def _changed(cfg: CfgNode) -> Iterator[CfgNode]:
    """A copy that can be changed inside, and is frozen afterwards if ``cfg`` is."""
    copy = cfg.clone()
    copy.defrost()
    yield copy
    if cfg.is_frozen():
        copy.freeze()


def _scale_lr(solver: CfgNode, scale: float) -> None:
    solver.BASE_LR, solver.BASE_LR_END = solver.BASE_LR * scale, solver.BASE_LR_END * scale
    if optimizer_argument(solver, "LR")[0] == "SOLVER.OPTIMIZER.LR":
        solver.OPTIMIZER.LR = solver.OPTIMIZER.LR * scale
    for entry in solver.SCHEDULES:
        if entry.get("END_VALUE") is not None:
            entry["END_VALUE"] = entry["END_VALUE"] * scale
