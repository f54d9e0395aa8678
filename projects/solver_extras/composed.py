"""Schedules that a config lists: SOLVER.SCHEDULES, and those of the hook ParamScheduler."""

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer
from trainkit.projects.solver_extras.schedules import SCHEDULE_REGISTRY, Chain, Segment

from trainkit.config.config import CfgNode
from trainkit.solver.build import LR_SCHEDULER_BUILDER_REGISTRY
from trainkit.solver.lr_scheduler import Schedule, ScheduledLR
from trainkit.utils.errors import ConfigError, look_up, not_accepted, unknown_name
from trainkit.utils.periods import exact, is_whole, periods_done

_logger = logging.getLogger(__name__)

_EXAMPLE = '{NAME: Linear, END: 500} or {NAME: Cosine, BEGIN: 500, END: "90ep"}'
_LENGTHS = ("length", "milestones", "periods", "timescale")  # arguments in iterations


@LR_SCHEDULER_BUILDER_REGISTRY.register()
def listed_schedules(cfg: CfgNode, optimizer: Optimizer) -> ScheduledLR:
    """The builder for SOLVER.LR_SCHEDULER_BUILDER: the schedules of SOLVER.SCHEDULES, see `build_schedule`."""
    _logger.info("SOLVER.SCHEDULES is used; SOLVER.LR_SCHEDULER_NAME and SOLVER.WARMUP_* have no effect")
    max_iter = _iters("SOLVER.MAX_ITER", cfg.SOLVER.MAX_ITER, at_least=1)
    return ScheduledLR(optimizer, build_schedule(cfg.SOLVER.SCHEDULES, max_iter, "SOLVER.SCHEDULES"))


def build_schedule(entries: Iterable[Any], max_iter: int, where: str) -> Schedule:
    """Chain the schedules that a config lists; ``where`` is the name of the list in errors.

    Args:
        entries: each ``{NAME: a name in SCHEDULE_REGISTRY, ...}`` with the arguments in upper case. The default of
            ``BEGIN`` is 0, that of ``END`` (not included) ``max_iter``. If a schedule has an argument ``LENGTH``, its
            default is ``END - BEGIN``. With ``STEP_SIZE`` a value is held for so many iterations: the schedule counts
            steps of this size in place of iterations, as in OpenMMLab with ``by_epoch``.

    Raises ConfigError: an entry is malformed, or its schedule is unknown or refuses a value.
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


def _make_schedule(here: str, entry: Mapping[str, Any], length: int) -> Schedule:
    factory = look_up(SCHEDULE_REGISTRY, entry["NAME"], f"{here}: NAME")
    known = inspect.signature(factory).parameters
    arguments = {key.lower(): value for key, value in entry.items() if key not in ("NAME", "BEGIN", "END")}
    if unknown := arguments.keys() - {"step_size", *known}:
        accepted = ["BEGIN", "END", "STEP_SIZE", *map(str.upper, known)]
        raise unknown_name(here, min(unknown).upper(), "it takes", accepted)
    if "length" in known:
        arguments.setdefault("length", length)
    step_size = None
    if "step_size" in arguments and "step_size" not in known:
        step_size = _iters(f"{here}: STEP_SIZE", arguments.pop("step_size"), at_least=1)
        arguments |= {name: _in_steps(arguments[name], step_size) for name in _LENGTHS if name in arguments}
    try:
        schedule: Schedule = factory(**arguments)
        schedule(0, 1.0)  # a wrong type is an error now
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        given = ", ".join(f"{name.upper()}={value!r}" for name, value in arguments.items())
        raise ConfigError(f"{here} refuses {given or 'no arguments'}: {error}") from error
    return schedule if step_size is None else lambda t, base: schedule(periods_done(t, step_size), base)


def _in_steps(length: Any, step_size: int) -> Any:
    """A length, or a list of them, in steps of ``step_size``; other values stay, for the error of the schedule."""
    if isinstance(length, list | tuple):
        return [_in_steps(item, step_size) for item in length]
    return max(round(exact(length) / exact(step_size)), 1) if is_whole(length, 1) else length


def _iters(key: str, value: object, at_least: int) -> int:
    if not is_whole(value, at_least):
        raise not_accepted(key, value, f"iterations, an int >= {at_least}")
    return value
