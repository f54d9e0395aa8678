"""The learning rates of a whole run, before it is made."""

import time
import warnings
from typing import Any

from trainkit.projects.preflight.findings import NotAsked

from trainkit.config import get_cfg
from trainkit.solver.lr_scheduler import ScheduledLR

_POINTS = 300
_SEC = 10.0  # for the steps of a scheduler of torch


def rates_of(trainer: Any, length: int) -> dict[int, float]:
    """Iteration -> the learning rate of the first parameter group. The scheduler of ``trainer`` is used up.

    Raises:
        NotAsked: the scheduler needs more than a call of ``step()``, or the run has too many steps.
    """
    scheduler = trainer.scheduler
    every = max(1, length // _POINTS)
    if isinstance(scheduler, ScheduledLR):
        base = scheduler.base_lrs[0]
        iterations = [*range(0, length, every), length - 1]
        return {i: scheduler.schedule(i, base) for i in iterations}
    rates = {}
    group = trainer.optimizer.param_groups[0]
    end = time.monotonic() + _SEC
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer makes no steps
        for i in range(length):
            if i % every == 0 or i == length - 1:
                rates[i] = float(group["lr"])
            try:
                scheduler.step()
            except TypeError as error:
                raise NotAsked(
                    f"{type(scheduler).__name__}.step() needs arguments", "schedule"
                ) from error
            if time.monotonic() > end:
                raise NotAsked(
                    f"{length} steps of {type(scheduler).__name__} take long", "schedule"
                )
    return rates


def first_rates(rates: dict[int, float]) -> str:
    """About thirty bars, and the numbers of the first, the highest and the last rate."""
    peak = max(rates, key=rates.__getitem__)
    values = [*rates.values()]
    highest = rates[peak] or 1
    bars = ""
    for rate in values[:: max(1, len(values) // 30)]:
        height = min(7, int(8 * rate / highest))
        bars += "▁▂▃▄▅▆▇█"[height]
    return f"{bars} from {values[0]:.2g} to {rates[peak]:.2g} at {peak}, then {values[-1]:.2g}"


def ends_early(rates: dict[int, float]) -> str:
    """From when on the rate is low and does not change any more, in words; "" if it is not for long."""
    last_iter = max(rates)
    last = rates[last_iter]
    peak = max(rates.values())
    changing = [i for i, rate in rates.items() if rate != last]
    if not changing:
        return ""
    start = min(i for i in rates if i > max(changing))
    share = (last_iter + 1 - start) / (last_iter + 1)
    is_zero = last < 1e-4 * peak and share > 0.1
    is_low = last < 0.05 * peak and share > 0.4
    is_lower = last < 0.5 * peak and share > 0.5
    if is_zero or is_low or is_lower:
        return f"it ends long before the run: from {start} on the rate is {last:.2g}"
    return ""


def never_come(cfg: Any, scheduler: Any, rates: dict[int, float]) -> str:
    """The part of the schedule that starts after the run, in words; "" if there is none."""
    solver = cfg.SOLVER
    length = max(rates) + 1
    if not isinstance(scheduler, ScheduledLR):
        is_constant = len({*rates.values()}) == 1
        return f"{type(scheduler).__name__} never changes the rate" if is_constant else ""
    if max(rates.values()) < 0.5 * scheduler.base_lrs[0]:
        return f"the rate never reaches {scheduler.base_lrs[0]:.2g}"
    steps = []
    uses_steps = solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR" and not solver.get("SCHEDULES")
    if uses_steps and tuple(solver.STEPS) != get_cfg().SOLVER.STEPS:
        steps = [step for step in solver.STEPS if step >= length]
    for part in solver.get("SCHEDULES", ()):
        if part.get("BEGIN", 0) >= length:
            steps.append(part["BEGIN"])
    if not steps:
        return ""
    return f"it starts after the run: at {steps[0]} of {length}"
