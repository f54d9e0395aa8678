"""Questions over past iterations: a hook, where did it first go wrong, and which steps had the largest losses?"""

import contextlib
import heapq
import json
import math
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
from trainkit.projects.replay.checkpoints import CAPSULES, Saved, Values, around, compare_way, logged_values, saved_in
from trainkit.projects.replay.inspection import floating_tensors
from trainkit.projects.replay.session import Folder, Session, Start

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.atomic import write_text
from trainkit.config import ConfigError
from trainkit.engine import HookBase
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model


def replay_range(
    run: Folder, first: int, end: int, make_hook: Callable[[], HookBase], output_dir: Folder, start: Start = None
) -> str:
    """Perform iterations ``first`` to ``end`` - 1 of a run again, with one more hook; see `replay`.

    It writes the values that the hook puts into the storage, and those of the run, to ``metrics.json`` in
    ``output_dir``: a line for each iteration, null for a value that is not finite. Returns a comparison with the values
    that the run has stored. It shows whether the hook has changed the run, or that an iteration has "FAILED".
    """
    values, text = _Range(os.path.abspath(run), first, end, make_hook).perform(start)
    if comm.is_main_process():
        finite = {i: {k: v if math.isfinite(v) else None for k, v in row.items()} for i, row in sorted(values.items())}
        lines = [json.dumps({"iteration": iter, **row}) + "\n" for iter, row in finite.items()]
        os.makedirs(output_dir, exist_ok=True)
        write_text("".join(lines), os.path.join(output_dir, "metrics.json"))
    return str(text)


def worst(run: Folder, first: int, end: int, num: int, start: Start = None) -> str:
    """The iterations from ``first`` to ``end`` - 1 with the largest losses, with their samples, as text."""
    losses = Quantity("loss")
    way = _Range(os.path.abspath(run), first, end, lambda: losses).perform(start)[1]
    rows = heapq.nlargest(num, losses.found, lambda row: _nan_is_largest(row[1]))
    return "\n".join([*(f"iteration {iter}: loss {value:.4g}; {', '.join(names)}" for iter, value, names in rows), way])


def first_bad(run: Folder, last: int | None, quantity: str = "loss", times: float = 10.0, start: Start = None) -> str:
    """The first iteration, up to ``last`` (None: the end), in which a `Quantity` is out of its band."""
    run = os.path.abspath(run)
    if last is None:
        last = max((saved.iteration for saved in saved_in(run) + saved_in(run, CAPSULES)), default=0)
    return str(_Search(run, last, quantity, times).perform(start))


class _Range(Session):
    """``work`` returns the values of the iterations, and their comparison with those of the run."""

    def __init__(self, run: str, first: int, end: int, make_hook: Callable[[], HookBase]) -> None:
        super().__init__(run, first, *around(run, first))
        self._after, self._end, self._make_hook = around(run, end - 1)[1], end, make_hook

    def work(self, trainer: Any) -> tuple[Values, str]:
        if self._end > trainer.max_iter:
            raise ConfigError(f"--range ends with {self._end}; the run ends with {trainer.max_iter}; make it smaller")
        self._go_on(self._at - 1)
        error = self._go_on(self._end - 1, self._make_hook())
        values = logged_values(trainer.storage.state_dict(), self._at, self._end)
        way = compare_way(values, self._after, self._end - 1)[0] if comm.is_main_process() else ""
        failure = f"FAILED in iteration {trainer.iter}: {error.partition('. ')[0]}; " if error else ""
        return values, comm.broadcast(failure + way)


Found = tuple[int, float, list[str]]  # iteration, value, names of the samples


class Quantity(HookBase):
    """Measures one number of each step; ``found`` gets it, with the iteration and the names of the samples.

    ``name`` is "loss", "grad_norm", "weight" (the largest absolute value); the name of a module, whose largest absolute
    output it is; or a Python expression of ``trainer`` and ``torch``, evaluated after the backward pass.
    """

    def __init__(self, name: str) -> None:
        self._name, self._is_module = name, False
        self._values: list[float] = []  # of this step
        self.found: list[Found] = []

    def before_train(self) -> None:
        if module := dict(unwrap_model(self.trainer.model).named_modules()).get(self._name):
            self._is_module = True
            module.register_forward_hook(lambda module, args, output: self._see(output))

    def before_step(self) -> None:
        self._values = []

    def _see(self, output: Any) -> None:
        self._values += [tensor.abs().max().item() for tensor in floating_tensors(output)]

    def after_backward(self) -> None:
        trainer, parameters = self.trainer, [*unwrap_model(self.trainer.model).parameters()]
        measures: dict[str, Callable[[], Any]] = {
            "loss": lambda: sum(trainer.losses[name] for name in trainer.trained_losses),
            "grad_norm": lambda: torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]),
            "weight": lambda: max(p.detach().abs().max() for p in parameters),
        }
        if not self._is_module:
            try:  # eval of the user's own command line
                measure = measures.get(self._name) or (lambda: eval(self._name, {"trainer": trainer, "torch": torch}))
                self._values = [float(measure())]
            except Exception as error:
                accepted = "loss, grad_norm, weight, the name of a module, or Python"
                raise ConfigError(f"--quantity is {self._name!r} ({error}); accepted: {accepted}") from error

    def after_step(self) -> None:
        """Note the value of the present step; called after a failure too."""
        names: list[list[str]] = []
        with contextlib.suppress(AttributeError, RuntimeError):
            names = self.trainer.data_loader.names_of_last(self.trainer.feed.drawn)
        value = max(self._values, key=_nan_is_largest, default=math.nan)
        self.found.append((self.trainer.iter, value, [name for batch in names for name in batch]))


def _nan_is_largest(value: float) -> float:
    return math.inf if math.isnan(value) else value


class _Search(Session):
    def __init__(self, run: str, last: int, quantity: str, times: float) -> None:
        self._checkpoints = [saved for saved in saved_in(run) if saved[:2] <= (last, 1)]
        if not self._checkpoints:
            raise CheckpointError(f"'{run}' has no checkpoint before iteration {last}, from which a search could start")
        super().__init__(run, last, self._checkpoints[0], around(run, last)[1])
        self._last, self._quantity, self._times = last, quantity, times

    def work(self, trainer: Any) -> str:
        first = self._measure(self._checkpoints[0], 5)
        usual, good, bad = [value for _, value, _ in first if math.isfinite(value)], 0, len(self._checkpoints)
        while bad - good > 1:  # bisection over the checkpoints; the first one counts as good
            middle = (good + bad) // 2
            inside = self._first_outside(self._measure(self._checkpoints[middle], 1), usual) is None
            good, bad = (middle, bad) if inside else (good, middle)
        found = self._first_outside(self._measure(self._checkpoints[good], self._last + 1), usual)
        band, name = f"{self._times:g} times its running median", os.path.basename(self._checkpoints[good].path)
        if found is None:
            return f"{self._quantity} stays within {band} at the checkpoints that were tried, and from {name} on"
        where = f"in iteration {found[0]}: {found[1]:.4g}, more than {band} (from {name} on)"
        samples = ", ".join(found[2]) or "their names are not known"
        return f"{self._quantity} is first outside of its band {where}\nsamples: {samples}"

    def _measure(self, start: Saved, num: int) -> list[Found]:
        """The values of at most ``num`` steps from a checkpoint; a step that fails is the last one."""
        self._trainer.checkpointer.load(start.path, strict=True)
        quantity = Quantity(self._quantity)
        self._at = -1  # an error of a step is a result
        if self._go_on(min(self._trainer.last_done_iter + num, self._last), quantity):
            quantity.after_step()
        return quantity.found

    def _first_outside(self, found: list[Found], usual: list[float]) -> Found | None:
        """The first value outside of the band around the running median; None if there is none."""
        seen = [*usual]
        for row in found:
            if not math.isfinite(row[1]) or (seen and abs(row[1]) > self._times * abs(statistics.median(seen[-20:]))):
                return row
            seen.append(row[1])
        return None
