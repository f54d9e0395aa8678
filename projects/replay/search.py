"""Where did it first go wrong, and which steps had the largest losses? Questions over past iterations."""

import contextlib
import heapq
import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from trainkit.projects.replay.checkpoints import around, checkpoints_of
from trainkit.projects.replay.hindsight import Range
from trainkit.projects.replay.inspection import floating_tensors
from trainkit.projects.replay.origin import Saved
from trainkit.projects.replay.session import Session, Start

from trainkit.checkpoint import CheckpointError
from trainkit.config import ConfigError
from trainkit.engine import HookBase
from trainkit.utils.device import unwrap_model


class Quantity(HookBase):
    """Measures one number of each step.

    Args:
        name: "loss", "grad_norm", "weight" (the largest absolute value); the name of a module, whose largest absolute
            output it is; or a Python expression of ``trainer`` and ``torch``, evaluated after the backward pass.

    Attributes:
        found: (iteration, value, names of the samples) of each step.
    """

    def __init__(self, name: str) -> None:
        self._name, self._value, self._handles = name, math.nan, list[Any]()
        self.found: list[tuple[int, float, list[str]]] = []

    def before_step(self) -> None:
        self._value = math.nan
        modules = dict(unwrap_model(self.trainer.model).named_modules())
        if self._name in modules:
            self._value = 0.0
            self._handles = [modules[self._name].register_forward_hook(self._see_output)]

    def _see_output(self, module: Any, args: Any, output: Any) -> None:
        largest = [tensor.abs().max().item() for tensor in floating_tensors(output)]
        self._value = max([self._value, *largest], key=lambda value: math.inf if math.isnan(value) else value)

    def after_backward(self) -> None:
        trainer, model = self.trainer, unwrap_model(self.trainer.model)
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if self._handles:
            return
        if self._name == "loss":
            self._value = sum(float(trainer.losses[name]) for name in trainer.trained_losses)
        elif self._name == "grad_norm":
            self._value = float(torch.nn.utils.get_total_norm(grads))
        elif self._name == "weight":
            self._value = max(parameter.detach().abs().max().item() for parameter in model.parameters())
        else:
            value = eval(self._name, {"trainer": trainer, "torch": torch})  # of the user's own command line
            self._value = value.item() if isinstance(value, Tensor) else float(value)

    def after_step(self) -> None:
        self.note()

    def note(self) -> None:
        """Note the value of the present step; called after a failure too."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        names = [list[str]()]
        with contextlib.suppress(AttributeError, RuntimeError):
            names = self.trainer.data_loader.names_of_last(self.trainer.feed.drawn)
        self.found.append((self.trainer.iter, self._value, [name for batch in names for name in batch]))


class _Search(Session):
    def __init__(self, run: str, last: int, quantity: str, times: float) -> None:
        self._checkpoints = [saved for saved in checkpoints_of(run) if saved[:2] <= (last, 1)]
        if not self._checkpoints:
            raise CheckpointError(f"'{run}' has no checkpoint before iteration {last}, from which a search could start")
        super().__init__(run, last, self._checkpoints[0], around(run, last)[1])
        self._last, self._quantity, self._times = last, quantity, times

    def work(self, trainer: Any) -> str:
        if not self._is_known(trainer):
            accepted = "loss, grad_norm, weight, the name of a module, or Python"
            raise ConfigError(f"--quantity is {self._quantity!r}; accepted: {accepted}")
        first = self._measure(self._checkpoints[0], 5)
        usual, good, bad = [value for _, value, _ in first if math.isfinite(value)], 0, len(self._checkpoints)
        while bad - good > 1:  # bisection over the checkpoints; the first one counts as good
            middle = (good + bad) // 2
            inside = self._first_outside(self._measure(self._checkpoints[middle], 1), usual) is None
            good, bad = (middle, bad) if inside else (good, middle)
        start = self._checkpoints[good]
        found = self._first_outside(self._measure(start, self._last + 1), usual)
        band, name = f"{self._times:g} times its running median", os.path.basename(start.path)
        if found is None:
            return f"{self._quantity} stays within {band} at the checkpoints that were tried, and from {name} on"
        iteration, value, samples = found
        text = f"{self._quantity} is first outside of its band in iteration {iteration}: {value:.4g}, more than {band}"
        return f"{text} (from {name} on)\nsamples: {', '.join(samples) or 'their names are not known'}"

    def _is_known(self, trainer: Any) -> bool:
        with contextlib.suppress(SyntaxError):
            compile(self._quantity, "--quantity", "eval")
            return True
        return self._quantity in dict(unwrap_model(trainer.model).named_modules())

    def _measure(self, start: Saved, num: int) -> list[tuple[int, float, list[str]]]:
        """The values of at most ``num`` steps from a checkpoint; a step that fails is the last one."""
        self._trainer.checkpointer.load(start.path, strict=True)
        quantity = Quantity(self._quantity)
        self._at = -1  # an error of a step is a result
        if self._go_on(min(self._trainer.last_done_iter + num, self._last), quantity):
            quantity.note()
        return quantity.found

    def _first_outside(self, found: Sequence[tuple[int, float, list[str]]], usual: Sequence[float]) -> Any:
        """The first value outside of the band around the running median; None if there is none."""
        seen = [*usual]
        for row in found:
            if not math.isfinite(row[1]) or (seen and abs(row[1]) > self._times * abs(statistics.median(seen[-20:]))):
                return row
            seen.append(row[1])
        return None


def first_bad(
    run: str | os.PathLike[str], last: int, quantity: str = "loss", times: float = 10.0, start: Start = None
) -> str:
    """The first iteration up to ``last`` in which a `Quantity` is more than ``times`` its running median, as text."""
    return str(_Search(os.path.abspath(run), last, quantity, times).perform(start))


def worst(run: str | os.PathLike[str], first: int, end: int, num: int, start: Start = None) -> str:
    """The iterations from ``first`` to ``end`` - 1 with the largest losses, with their samples, as text."""
    losses = Quantity("loss")
    way = Range(os.path.abspath(run), first, end, lambda: losses).perform(start)[1]
    rows = heapq.nlargest(num, losses.found, lambda row: math.inf if math.isnan(row[1]) else row[1])
    return "\n".join([*(f"iteration {iter}: loss {value:.4g}; {', '.join(names)}" for iter, value, names in rows), way])
