"""Schedules as functions of the iteration: ``schedule(t, base)`` is the value ``t`` iterations after its start.

``base`` is the base value: a learning rate, a weight decay, a momentum. ``length`` is the number of iterations of the
schedule, by default ``END - BEGIN`` of its entry in the config. A schedule with an end value reaches it in its last
iteration, ``length - 1``, as in OpenMMLab, and keeps it; torch's ``total_iters`` is ``length - 1``. The end is
``end_value``, or ``end_ratio`` times the base (for groups with different bases); default is 0. If torch has the same
rule, the values equal its closed form bit by bit. A number out of its range is a ValueError: no factor is negative,
and a length is a whole number of at least 1 iteration.
"""

import inspect
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, Literal

from torch.optim import Optimizer

from trainkit.config.config import CfgNode
from trainkit.solver.build import LR_SCHEDULER_BUILDER_REGISTRY, warn_if_base_is_not_reached
from trainkit.solver.lr_scheduler import Schedule, ScheduledLR
from trainkit.utils.errors import ConfigError, look_up, not_accepted, unknown_name
from trainkit.utils.periods import (
    Period,
    check_number,
    check_period,
    is_whole,
    iterations_of,
    periods_done,
)
from trainkit.utils.registry import Registry

SCHEDULE_REGISTRY = Registry("SCHEDULE")
"""Classes and functions that return a `Schedule`. If a config gives no ``length``, it is that of the entry."""


@SCHEDULE_REGISTRY.register()
def Constant(length: int, factor: float = 1 / 3) -> Schedule:
    """``factor`` times the base; in the last iteration the base itself, so that the next schedule starts from it."""
    _check_length(length)
    check_number("factor", factor, "[0, inf)")

    def schedule(t: int, base: float) -> float:
        if t < length - 1:
            return base * factor
        return base * (factor + (1 - factor))

    return schedule


@SCHEDULE_REGISTRY.register()
def Linear(length: int, start_factor: float = 1 / 3, end_factor: float = 1.0) -> Schedule:
    """A straight line from ``start_factor`` times the base to ``end_factor`` times the base; the usual warm-up."""
    _check_length(length)
    check_number("start_factor", start_factor, "[0, inf)")
    check_number("end_factor", end_factor, "[0, inf)")
    rise = end_factor - start_factor
    steps = max(length - 1, 1)
    return lambda t, base: base * (start_factor + rise * _done(t, length) / steps)


@SCHEDULE_REGISTRY.register()
def ExponentialWarmup(length: int, factor: float = 1 / 3) -> Schedule:
    """From ``factor`` times the base to the base; each iteration multiplies the value by the same number."""
    _check_length(length)
    check_number("factor", factor, "(0, inf)")
    steps = max(length - 1, 1)
    return lambda t, base: base * factor ** (1 - _done(t, length) / steps)


@SCHEDULE_REGISTRY.register()
def Step(step_size: int, gamma: float = 0.1) -> Schedule:
    """Multiply by ``gamma`` every ``step_size`` iterations."""
    check_period("step_size", step_size, minimum=1)
    check_number("gamma", gamma, "[0, inf)")
    return lambda t, base: base * gamma ** periods_done(t, step_size)


@SCHEDULE_REGISTRY.register()
def MultiStep(milestones: Sequence[int], gamma: float = 0.1) -> Schedule:
    """Multiply by ``gamma`` at each of ``milestones`` (iterations from the start), again at a repeated milestone."""
    _check_milestones(milestones)
    check_number("gamma", gamma, "[0, inf)")
    milestones = sorted(milestones)
    return lambda t, base: base * gamma ** bisect_right(milestones, t)


@SCHEDULE_REGISTRY.register()
def PiecewiseLinear(milestones: Sequence[int], factors: Sequence[float]) -> Schedule:
    """Straight lines through points: at each of ``milestones`` the base times the factor at the same place.

    ``milestones`` are iterations from the start, which grow. Before the first the first factor counts, after the last
    the last one: ``[0, 100, 1000]`` and ``[0, 1, 0.1]`` is a warm-up of 100 iterations, then a line to a tenth.
    """
    _check_milestones(milestones)
    if not milestones or [*milestones] != sorted({*milestones}):
        raise ValueError(f"milestones must be iterations that grow, got {milestones!r}")
    if not isinstance(factors, list | tuple) or len(factors) != len(milestones):
        raise ValueError(
            f"factors must be one for each of milestones {milestones!r}, got {factors!r}"
        )
    for factor in factors:
        check_number("each of factors", factor, "[0, inf)")

    def schedule(t: int, base: float) -> float:
        after = bisect_right(milestones, t)
        if after == 0:
            return base * factors[0]
        if after == len(milestones):
            return base * factors[-1]
        start = milestones[after - 1]
        end = milestones[after]
        done = (t - start) / (end - start)
        factor = factors[after - 1] * (1 - done) + factors[after] * done
        return base * factor

    return schedule


@SCHEDULE_REGISTRY.register()
def Exponential(gamma: float) -> Schedule:
    """Multiply by ``gamma`` in each iteration."""
    check_number("gamma", gamma, "[0, inf)")
    return lambda t, base: base * gamma**t


@SCHEDULE_REGISTRY.register()
def Cosine(
    length: int, *, end_value: float | None = None, end_ratio: float | None = None
) -> Schedule:
    """From the base to the end along half a period of a cosine.

    As in torch and OpenMMLab, iteration ``length`` has the end value; the last iteration is ``length - 1``, so its
    value is a little above the end. After ``length`` the cosine rises again.
    """
    _check_length(length)
    end_of = _end(end_value, end_ratio)
    return lambda t, base: _half_cosine(base, end_of(base), t, length)


@SCHEDULE_REGISTRY.register()
def CosineRestarts(
    periods: Sequence[int],
    weights: Sequence[float] = (),
    *,
    end_value: float | None = None,
    end_ratio: float | None = None,
) -> Schedule:
    """Several `Cosine` in a row, of ``periods`` iterations each; the last value stays.

    ``weights``: each period starts at its weight times the base; default is 1 for all.
    """
    if not isinstance(periods, list | tuple) or not periods:
        raise ValueError(f"periods must be a list of lengths in iterations, got {periods!r}")
    for period in periods:
        check_period("each of periods", period, minimum=1)
    for weight in weights:
        check_number("each of weights", weight, "[0, inf)")
    if len(weights) not in (0, len(periods)):
        raise ValueError(f"weights must be one for each period, got {periods!r} and {weights!r}")
    end_of = _end(end_value, end_ratio)
    exact_ends = accumulate(iterations_of(period) for period in periods)
    edges = [0, *(round(end) for end in exact_ends)]

    def schedule(t: int, base: float) -> float:
        t = min(t, edges[-1] - 1)
        number = bisect_right(edges, t) - 1
        begin = edges[number]
        length = edges[number + 1] - begin
        weight = weights[number] if weights else 1.0
        return _half_cosine(base * weight, end_of(base), t - begin, length)

    return schedule


@SCHEDULE_REGISTRY.register()
def Polynomial(
    length: int,
    power: float = 1.0,
    *,
    end_value: float | None = None,
    end_ratio: float | None = None,
) -> Schedule:
    """From the base to the end by ``(1 - t / (length - 1)) ** power``."""
    _check_length(length)
    check_number("power", power, "(0, inf)")
    end_of = _end(end_value, end_ratio)
    steps = max(length - 1, 1)

    def schedule(t: int, base: float) -> float:
        end = end_of(base)
        left = 1.0 - _done(t, length) / steps
        return (base - end) * left**power + end

    return schedule


@SCHEDULE_REGISTRY.register()
def OneCycle(
    length: int,
    pct_start: float = 0.3,
    anneal: Literal["cos", "linear"] = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Up from ``base / div_factor`` to the base, and down to ``base / div_factor / final_div_factor``.

    The base is what torch calls ``max_lr``; each group has its own base. Smith and Topin, "Super-Convergence".
    ``pct_start``: fraction of the iterations in which the value rises. ``three_phase``: the value falls to the start
    value as fast as it rose, then to the end.
    """
    _check_length(length)
    check_number("pct_start", pct_start, "[0, 1]")
    check_number("div_factor", div_factor, "(0, inf)")
    check_number("final_div_factor", final_div_factor, "(0, inf)")
    if anneal not in ("cos", "linear"):
        raise ValueError(f"anneal must be cos or linear, got {anneal!r}")
    last = length - 1
    peak = float(pct_start * length) - 1
    latest_peak = last / 2 if three_phase else last
    if peak == 0 or peak >= latest_peak:
        raise ValueError(
            f"pct_start {pct_start!r} leaves no room to rise and fall in {length} iterations"
        )
    # the iterations at which the phases start and end
    edges = [0.0, peak, last]
    if three_phase:
        edges = [0.0, peak, float(2 * pct_start * length) - 2, last]

    def schedule(t: int, base: float) -> float:
        low = base / div_factor
        lowest = low / final_div_factor
        # at the edges
        values = [low, base, low, lowest] if three_phase else [low, base, lowest]
        t = min(t, last)
        phase = 0
        while t > edges[phase + 1]:
            phase += 1
        start = values[phase]
        end = values[phase + 1]
        done = (t - edges[phase]) / (edges[phase + 1] - edges[phase])
        if anneal == "linear":
            return (end - start) * done + start
        return end + (start - end) / 2.0 * (math.cos(math.pi * done) + 1)

    return schedule


@SCHEDULE_REGISTRY.register()
def InverseSquareRoot(timescale: int) -> Schedule:
    """``base * sqrt(timescale / (t + timescale))``; after a warm-up of ``timescale`` iterations it is the rule of
    Vaswani et al., "Attention Is All You Need"."""
    check_period("timescale", timescale, minimum=1)
    return lambda t, base: base * math.sqrt(timescale / (t + timescale))


def Segment(schedule: Schedule, begin: int, end: int) -> Schedule:
    """A schedule in iterations ``begin`` to ``end - 1``; before them it gives the base, after them the last value."""

    def segment(t: int, base: float) -> float:
        if t < begin:
            return base
        return schedule(min(t, end - 1) - begin, base)

    return segment


def Chain(segments: Sequence[Schedule]) -> Schedule:
    """The result of each segment is the base of the next one in the list.

    So segments in a row continue each other, and overlapping segments (a warm-up and milestones) are multiplied.
    """

    def schedule(t: int, base: float) -> float:
        for segment in segments:
            base = segment(t, base)
        return base

    return schedule


def _check_length(length: int) -> None:
    check_period("length", length, minimum=1)


def _check_milestones(milestones: Sequence[int]) -> None:
    if not isinstance(milestones, list | tuple):
        raise ValueError(f"milestones must be a list of iterations, got {milestones!r}")
    for milestone in milestones:
        check_period("each of milestones", milestone)


def _done(t: int, length: int) -> int:
    """The steps done from the first iteration to the last one; if there is only one iteration, it is the last one."""
    if length == 1:
        return 1
    return min(t, length - 1)


def _end(value: float | None, ratio: float | None) -> Callable[[float], float]:
    """A function from the base to the end."""
    if value is not None:
        check_number("end_value", value, "[0, inf)")
    if ratio is not None:
        check_number("end_ratio", ratio, "[0, inf)")
    if value is not None and ratio is not None:
        raise ValueError(
            f"end_value {value!r} and end_ratio {ratio!r} both say where it ends; give one"
        )
    if ratio is not None:
        return lambda base: base * ratio
    end = value or 0.0
    return lambda base: end


def _half_cosine(start: float, end: float, t: int, length: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * t / length)) / 2


_logger = logging.getLogger(__name__)

_EXAMPLE = '{NAME: Linear, END: 500} or {NAME: Cosine, BEGIN: 500, END: "90ep"}'
_LENGTHS = ("length", "milestones", "periods", "timescale")  # arguments in iterations


@LR_SCHEDULER_BUILDER_REGISTRY.register()
def listed_schedules(cfg: CfgNode, optimizer: Optimizer) -> ScheduledLR:
    """The builder for SOLVER.LR_SCHEDULER_BUILDER: the schedules of SOLVER.SCHEDULES, see `build_schedule`."""
    _logger.info(
        "SOLVER.SCHEDULES is used; SOLVER.LR_SCHEDULER_NAME and SOLVER.WARMUP_* have no effect"
    )
    max_iter = _iters("SOLVER.MAX_ITER", cfg.SOLVER.MAX_ITER, at_least=1)
    schedule = build_schedule(cfg.SOLVER.SCHEDULES, max_iter, "SOLVER.SCHEDULES")
    scheduler = ScheduledLR(optimizer, schedule)
    # all iterations of a short run; of a long one some, and those at which an entry begins or ends
    distance = max(max_iter // 2000, 1)
    looked_at = {*range(0, max_iter, distance), max_iter - 1}
    for entry in cfg.SOLVER.SCHEDULES:
        begin = entry.get("BEGIN", 0)
        end = entry.get("END", max_iter)
        looked_at |= {begin - 1, begin, end - 1, end}
    iterations = sorted(iter for iter in looked_at if 0 <= iter < max_iter)
    advice = (
        "give the later entry of SOLVER.SCHEDULES a BEGIN, since entries that overlap are "
        "multiplied"
    )
    warn_if_base_is_not_reached(scheduler, iterations, advice)
    return scheduler


def build_schedule(entries: Iterable[Any], max_iter: int, where: str) -> Schedule:
    """Chain the schedules that a config lists; ``where`` is the name of the list in errors.

    ``entries``: each ``{NAME: a name in SCHEDULE_REGISTRY, ...}`` with the arguments in upper case. The default of
    ``BEGIN`` is 0, that of ``END`` (not included) ``max_iter``. If a schedule has an argument ``LENGTH``, its default
    is ``END - BEGIN``. With ``STEP_SIZE`` a value is held for so many iterations: the schedule counts steps of this
    size in place of iterations, as in OpenMMLab with ``by_epoch``.

    Raises ConfigError: an entry is malformed, or its schedule is unknown or refuses a value.
    """
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"{where} must be a list of entries such as {_EXAMPLE}; got {entries!r}")
    segments = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("NAME"), str):
            raise ConfigError(
                f"{where}[{number}] must be an entry such as {_EXAMPLE}; got {entry!r}"
            )
        here = f"{where}[{number}] ({entry['NAME']})"
        begin = _iters(f"{here}: BEGIN", entry.get("BEGIN", 0), at_least=0)
        if begin >= max_iter:
            _logger.warning(
                "%s has no effect: it starts at %d, the training ends at %d", here, begin, max_iter
            )
        default_end = max_iter if begin < max_iter else begin + max_iter
        end = _iters(f"{here}: END", entry.get("END", default_end), at_least=begin + 1)
        schedule = _make_schedule(here, entry, end - begin)
        segments.append(Segment(schedule, begin, end))
    return Chain(segments)


def _make_schedule(here: str, entry: Mapping[str, Any], length: int) -> Schedule:
    factory = look_up(SCHEDULE_REGISTRY, entry["NAME"], f"{here}: NAME")
    known = inspect.signature(factory).parameters
    arguments: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in ("NAME", "BEGIN", "END"):
            arguments[key.lower()] = value
    unknown = arguments.keys() - {"step_size", *known}
    if unknown:
        accepted = ["BEGIN", "END", "STEP_SIZE", *map(str.upper, known)]
        raise unknown_name(here, min(unknown).upper(), "it takes", accepted)
    if "length" in known:
        arguments.setdefault("length", length)
    step_size = None
    if "step_size" in arguments and "step_size" not in known:
        step_size = arguments.pop("step_size")
        if not isinstance(step_size, Period):
            step_size = _iters(f"{here}: STEP_SIZE", step_size, at_least=1)
        for name in _LENGTHS:
            if name in arguments:
                arguments[name] = _in_steps(arguments[name], step_size)
    try:
        schedule: Schedule = factory(**arguments)
        schedule(0, 1.0)  # a wrong type is an error now
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        given = ", ".join(f"{name.upper()}={value!r}" for name, value in arguments.items())
        raise ConfigError(f"{here} refuses {given or 'no arguments'}: {error}") from error
    if step_size is None:
        return schedule
    return lambda t, base: schedule(periods_done(t, step_size), base)


def _in_steps(length: Any, step_size: int | Period) -> Any:
    """A length, or a list of them, in steps of ``step_size``; other values stay, for the error of the schedule."""
    if isinstance(length, list | tuple):
        return [_in_steps(item, step_size) for item in length]
    if not is_whole(length, 1) and not isinstance(length, Period):
        return length
    steps = iterations_of(length) / Fraction(iterations_of(step_size))
    return max(round(steps), 1)


def _iters(key: str, value: object, at_least: int) -> int:
    if not is_whole(value, at_least):
        raise not_accepted(key, value, f"iterations, an int >= {at_least}")
    return value
