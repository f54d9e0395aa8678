"""Build a learning-rate schedule from a config."""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fvcore.common.param_scheduler import (
    ConstantParamScheduler,
    CosineParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
    StepWithFixedGammaParamScheduler,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.config.checks import check_is_ours
from trainkit.config.config import CfgNode
from trainkit.config.defaults import get_cfg
from trainkit.config.errors import ConfigError, unknown_name
from trainkit.config.scaling import optimizer_argument
from trainkit.solver.lr_scheduler import KeepLastValue, LRFunction, LRMultiplier, WarmupParamScheduler
from trainkit.solver.schedules import SCHEDULE_REGISTRY, Chain, Schedule, Segment
from trainkit.utils.numbers import is_whole

_logger = logging.getLogger(__name__)

_EXAMPLE = '{NAME: Linear, END: 500} or {NAME: Cosine, BEGIN: 500, END: "90ep"}'


def build_lr_scheduler(cfg: CfgNode, optimizer: Optimizer) -> LRScheduler:
    """Build ``SOLVER.SCHEDULES``, or else ``SOLVER.LR_SCHEDULER_NAME``; after ``MAX_ITER`` the last value stays.

    ``SCHEDULES`` is a list as for ``build_schedule``. The named schedules have a warm-up: ``WarmupMultiStepLR``
    multiplies by ``GAMMA`` at each of ``STEPS``, ``WarmupCosineLR`` falls to ``BASE_LR_END``, and
    ``WarmupStepWithFixedGammaLR`` multiplies by ``GAMMA`` at ``NUM_DECAYS`` evenly spaced times. All lengths are in
    iterations; ``trainkit.config.resolve_lengths`` converts epochs. Default ``WARMUP_ITERS`` and ``STEPS`` beyond
    ``MAX_ITER`` are cut off.

    Raises:
        ConfigError: the name is unknown, or a value is not accepted.
    """
    check_is_ours(cfg)
    solver = cfg.SOLVER
    max_iter = _iters("SOLVER.MAX_ITER", solver.MAX_ITER, at_least=1)
    if solver.SCHEDULES:
        _logger.info("SOLVER.SCHEDULES is used; SOLVER.LR_SCHEDULER_NAME and SOLVER.WARMUP_* have no effect")
        return LRFunction(optimizer, build_schedule(solver.SCHEDULES, max_iter, "SOLVER.SCHEDULES"))
    if solver.LR_SCHEDULER_NAME not in _SCHEDULES:
        raise unknown_name("SOLVER.LR_SCHEDULER_NAME", solver.LR_SCHEDULER_NAME, "accepted", _SCHEDULES)
    warmup_iters = _iters("SOLVER.WARMUP_ITERS", solver.WARMUP_ITERS, at_least=0)
    if warmup_iters == get_cfg().SOLVER.WARMUP_ITERS:  # the user has not set it
        warmup_iters = min(warmup_iters, max_iter - solver.RESCALE_INTERVAL)  # rescaling needs an iteration after them
    if warmup_iters > max_iter:
        raise ConfigError(
            f"SOLVER.WARMUP_ITERS={warmup_iters} is longer than SOLVER.MAX_ITER={max_iter}; "
            "shorten the warm-up (0: none)"
        )
    try:
        schedule = WarmupParamScheduler(
            KeepLastValue(_SCHEDULES[solver.LR_SCHEDULER_NAME](cfg)),
            solver.WARMUP_FACTOR,
            warmup_iters / max_iter,
            solver.WARMUP_METHOD,
            solver.RESCALE_INTERVAL,
        )
    except ValueError as error:
        raise ConfigError(f"SOLVER.LR_SCHEDULER_NAME {solver.LR_SCHEDULER_NAME}: {error}") from error
    return LRMultiplier(optimizer, schedule, max_iter)


def _multi_step(cfg: CfgNode) -> ParamScheduler:
    steps, max_iter = [_iters("SOLVER.STEPS", step, at_least=1) for step in cfg.SOLVER.STEPS], cfg.SOLVER.MAX_ITER
    if steps != sorted(set(steps)):
        raise ConfigError(f"SOLVER.STEPS must grow from one to the next, got {tuple(steps)}")
    if late := tuple(step for step in steps if step >= max_iter):
        if (*steps,) != get_cfg().SOLVER.STEPS:
            _logger.warning("SOLVER.STEPS %s are dropped: the training ends before them, at %d", late, max_iter)
        steps = steps[: -len(late)]
    if not steps:
        return ConstantParamScheduler(1.0)
    values = [cfg.SOLVER.GAMMA**decays for decays in range(len(steps) + 1)]
    return MultiStepParamScheduler(values, milestones=steps, num_updates=max_iter)


def _cosine(cfg: CfgNode) -> ParamScheduler:
    key, lr = optimizer_argument(cfg.SOLVER, "LR")
    if not 0.0 <= cfg.SOLVER.BASE_LR_END <= lr or lr == 0:
        raise ConfigError(
            f"SOLVER.BASE_LR_END={cfg.SOLVER.BASE_LR_END} must be between 0 and {key}={lr}, which must not be 0"
        )
    return CosineParamScheduler(1.0, cfg.SOLVER.BASE_LR_END / lr)


def _fixed_gamma(cfg: CfgNode) -> ParamScheduler:
    solver = cfg.SOLVER
    if solver.NUM_DECAYS < 1:
        raise ConfigError(f"SOLVER.NUM_DECAYS must be >= 1, got {solver.NUM_DECAYS}")
    return StepWithFixedGammaParamScheduler(1.0, solver.NUM_DECAYS, solver.GAMMA, solver.MAX_ITER)


_SCHEDULES: dict[str, Callable[[CfgNode], ParamScheduler]] = {
    "WarmupMultiStepLR": _multi_step,
    "WarmupCosineLR": _cosine,
    "WarmupStepWithFixedGammaLR": _fixed_gamma,
}


def _iters(key: str, value: object, at_least: int) -> int:
    if not is_whole(value, at_least):
        raise ConfigError(
            f"{key} must be in iterations, an int >= {at_least}, got {value!r}; "
            "trainkit.config.resolve_lengths turns epochs into iterations"
        )
    return value


def build_schedule(entries: Iterable[Any], max_iter: int, where: str) -> Schedule:
    """Chain the schedules that a config lists.

    Args:
        entries: each ``{NAME: a name in SCHEDULE_REGISTRY, ...}`` with the arguments in upper case. The default of
            ``BEGIN`` is 0, that of ``END`` (not included) ``max_iter``. If a schedule has an argument ``LENGTH``, its
            default is ``END - BEGIN``.
        where: name of the list in errors.

    Raises:
        ConfigError: an entry is malformed, or its schedule is unknown or refuses a value.
    """
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"{where} must be a list of entries such as {_EXAMPLE}; got {entries!r}")
    segments = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("NAME"), str):
            raise ConfigError(f"{where}[{number}] must be an entry such as {_EXAMPLE}; got {entry!r}")
        here = f"{where}[{number}] ({entry['NAME']})"
        begin = _iters(f"{here}: BEGIN", entry.get("BEGIN", 0), at_least=0)
        if begin >= max_iter:
            _logger.warning("%s has no effect: it starts at %d, the training ends at %d", here, begin, max_iter)
        end = entry.get("END", max_iter if begin < max_iter else begin + max_iter)
        end = _iters(f"{here}: END", end, at_least=begin + 1)
        segments.append(Segment(_make_schedule(here, entry, end - begin), begin, end))
    return Chain(segments)


def _make_schedule(here: str, entry: Mapping[str, Any], length: int) -> Any:
    if entry["NAME"] not in SCHEDULE_REGISTRY:
        accepts = "accepted (your own: register it in SCHEDULE_REGISTRY, and name its module in IMPORTS)"
        raise unknown_name(f"{here}: NAME", entry["NAME"], accepts, [name for name, _ in SCHEDULE_REGISTRY])
    factory = SCHEDULE_REGISTRY.get(entry["NAME"])
    known = inspect.signature(factory).parameters
    arguments = {key.lower(): value for key, value in entry.items() if key not in ("NAME", "BEGIN", "END")}
    for name in arguments:
        if name not in known:
            accepted = ["BEGIN", "END", *(name.upper() for name in known)]
            raise unknown_name(here, name.upper(), "it takes", accepted)
    if "length" in known:
        arguments.setdefault("length", length)
    try:
        return factory(**arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name.upper()}={value!r}" for name, value in arguments.items())
        raise ConfigError(f"{here} refuses {given or 'no arguments'}: {error}") from error
