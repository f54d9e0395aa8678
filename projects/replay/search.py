"""Questions over past iterations: a hook, where did it first go wrong, and which steps had the largest losses?"""

import contextlib
import heapq
import json
import math
import os
import statistics
from bisect import bisect_left
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from trainkit.projects.replay.checkpoints import (
    Saved,
    Values,
    around,
    compare_way,
    files_of,
    logged_values,
)
from trainkit.projects.replay.failure import describe_error
from trainkit.projects.replay.inspection import floating_tensors
from trainkit.projects.replay.session import Folder, Session, Start

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.atomic import write_text
from trainkit.config import ConfigError
from trainkit.engine import HookBase
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model


def replay_range(
    run: Folder,
    first: int,
    end: int,
    make_hook: Callable[[], HookBase],
    output_dir: Folder,
    start: Start = None,
) -> str:
    """Perform iterations ``first`` to ``end`` - 1 of a run again, with one more hook; see `replay`.

    It writes the values that the hook puts into the storage, and those of the run, to ``metrics.json`` in
    ``output_dir``: a line for each iteration, null for a value that is not finite. Returns a comparison with the values
    that the run has stored. It shows whether the hook has changed the run, or that an iteration has "FAILED".
    """
    values, text = _repeat(run, first, end, make_hook, start)
    if comm.is_main_process():
        lines = []
        for iter, row in sorted(values.items()):
            finite = {name: _null_if_not_finite(value) for name, value in row.items()}
            lines.append(json.dumps({"iteration": iter, **finite}) + "\n")
        os.makedirs(output_dir, exist_ok=True)
        write_text("".join(lines), os.path.join(output_dir, "metrics.json"))
    return text


def _null_if_not_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def is_equal(answer: str) -> bool:
    """Whether an answer of this module says that all iterations are there and equal those of the run."""
    return not any(line.startswith(("DIFFERENT", "FAILED")) for line in answer.splitlines())


def worst(run: Folder, first: int, end: int, num: int, start: Start = None) -> str:
    """The iterations from ``first`` to ``end`` - 1 with the largest losses, with their samples, as text."""
    losses = Quantity("loss")
    _, way = _repeat(run, first, end, lambda: losses, start)
    rows = heapq.nlargest(num, losses.found, lambda row: _nan_is_largest(row[1]))
    lines = []
    for iter, value, names in rows:
        lines.append(f"iteration {iter}: loss {value:.4g}; {', '.join(names)}")
    return "\n".join([*lines, way])


def _repeat(
    run: Folder, first: int, end: int, make_hook: Callable[[], HookBase], start: Start
) -> tuple[Values, str]:
    """The values of the iterations, and their comparison with those of the run."""
    run = os.path.abspath(run)
    end_place = around(run, end - 1)
    session = Session(run, first, around(run, first))

    def work(trainer: Any) -> tuple[Values, str]:
        if end > trainer.max_iter:
            raise ConfigError(
                f"--range ends with {end}; the run ends with {trainer.max_iter}; make it smaller"
            )
        start_iter = trainer.start_iter
        session.go_on(first - 1)
        error = session.go_on(end - 1, make_hook())
        values = logged_values(trainer.storage.state_dict(), first, end)
        text = ""
        if comm.is_main_process():
            text, _ = compare_way(values, end_place.after, end - 1)
        failure, comparison = session.compare_endings(start_iter, end - 1, error)
        if error is not None and comparison != "only here":
            text = f"FAILED in iteration {trainer.iter}: {_first_sentence(error)}; {text}"
        if failure.startswith("DIFFERENT"):
            text = f"{failure}; {text}"
        notes = dict.fromkeys([*session.place.notes, *end_place.notes])
        lines = [text]
        lines += [f"not as in the run: {note}" for note in notes]
        return values, comm.broadcast("\n".join(lines))

    found: tuple[Values, str] = session.perform(start, work)
    return found


def _first_sentence(error: Exception) -> str:
    return describe_error(error).partition(". ")[0]


Found = tuple[int, float, list[str]]  # iteration, value, names of the samples

_QUANTITIES = {
    "loss": "sum(trainer.losses[name] for name in trainer.trained_losses)",
    "grad_norm": "torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters() if p.grad is not None])",
    "weight": "max(p.detach().abs().max() for p in trainer.model.parameters())",
}


class Quantity(HookBase):
    """Measures one number of each step; ``found`` gets it, with the iteration and the names of the samples.

    ``name`` is one of `_QUANTITIES`; the name of a module, whose largest absolute output it is; or a Python expression
    of ``trainer`` and ``torch``, evaluated after the backward pass.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: Any = None  # with this name, if there is one
        self._values: list[float] = []  # of this step
        self.found: list[Found] = []

    def before_train(self) -> None:
        self._module = dict(unwrap_model(self.trainer.model).named_modules()).get(self._name)
        if self._module is not None:
            self._module.register_forward_hook(lambda module, args, output: self._see(output))

    def before_step(self) -> None:
        self._values = []

    def _see(self, output: Any) -> None:
        self._values += [tensor.abs().max().item() for tensor in floating_tensors(output)]

    def after_backward(self) -> None:
        if self._module is None:
            expression = _QUANTITIES.get(self._name, self._name)
            try:  # eval of the user's own command line
                value = eval(expression, {"trainer": self.trainer, "torch": torch})
                self._values = [float(value)]
            except Exception as error:
                accepted = "loss, grad_norm, weight, the name of a module, or Python"
                raise ConfigError(
                    f"--quantity is {self._name!r} ({error}); accepted: {accepted}"
                ) from error

    def after_step(self) -> None:
        """Note the value of the present step; called after a failure too."""
        names: list[list[str]] = []
        with contextlib.suppress(AttributeError, RuntimeError):
            names = self.trainer.data_loader.names_of_last(self.trainer.feed.drawn)
        value = max(self._values, key=_nan_is_largest, default=math.nan)
        self.found.append((self.trainer.iter, value, [*chain(*names)]))


def _nan_is_largest(value: float) -> float:
    return math.inf if math.isnan(value) else value


def first_bad(
    run: Folder, last: int | None, quantity: str = "loss", times: float = 10.0, start: Start = None
) -> str:
    """The first iteration, up to ``last`` (None: the end), in which a `Quantity` is out of its band.

    A line of the text says if an iteration that was repeated last is not as in the run.
    """
    run = os.path.abspath(run)
    files = files_of(run)
    if last is None:
        all_files = files.checkpoints + files.capsules
        last = max((saved.iteration for saved in all_files), default=0)
    checkpoints = [saved for saved in files.checkpoints if saved.done < last]
    if not checkpoints:
        raise CheckpointError(
            f"'{run}' has no checkpoint before iteration {last}, from which a search could start"
        )
    session = Session(run, last, around(run, last)._replace(before=checkpoints[0]))

    def measure(saved: Saved, num: int) -> tuple[list[Found], Exception | None]:
        """The values of at most ``num`` steps from a checkpoint; a step that fails is the last one."""
        session.trainer.checkpointer.load(saved.path, strict=True)
        hook = Quantity(quantity)
        session.at = -1  # an error of a step is a result
        error = session.go_on(min(session.trainer.done - 1 + num, last), hook)
        if error is not None:
            hook.after_step()
        return hook.found, error

    def first_outside(found: list[Found], usual: list[float]) -> Found | None:
        """The first value outside of the band around the running median; None if there is none."""
        seen = [*usual]
        for row in found:
            _, value, _ = row
            if not math.isfinite(value):
                return row
            if seen:
                median = statistics.median(seen[-20:])
                if abs(value) > times * abs(median):
                    return row
            seen.append(value)
        return None

    def leaves_band(saved: Saved, usual: list[float]) -> bool:
        """Whether the first step from a checkpoint is outside of the band."""
        found, _ = measure(saved, 1)
        return first_outside(found, usual) is not None

    def work(trainer: Any) -> str:
        found, _ = measure(checkpoints[0], 5)
        usual = [value for _, value, _ in found if math.isfinite(value)]
        # the first checkpoint counts as good
        candidates = checkpoints[1:]
        later = bisect_left(candidates, True, key=lambda saved: leaves_band(saved, usual))
        rows, error = measure(checkpoints[later], last + 1)
        name = os.path.basename(checkpoints[later].path)
        lines = [describe(first_outside(rows, usual), name)]
        first = checkpoints[later].iteration
        values = logged_values(trainer.storage.state_dict(), first, last + 1)
        way, _ = compare_way(values, session.next, last)
        failure, _ = session.compare_endings(first, last, error)
        differences = [text for text in (failure, way) if text.startswith("DIFFERENT")]
        notes = [f"{name} is damaged: {damage}" for name, damage in files.damaged.items()]
        return "\n".join([*lines, *differences, *notes])

    def describe(found: Found | None, name: str) -> str:
        band = f"{times:g} times its running median"
        if found is None:
            return f"{quantity} stays within {band} at the checkpoints that were tried, and from {name} on"
        iter, value, names = found
        where = f"in iteration {iter}: {value:.4g}, more than {band} (from {name} on)"
        samples = ", ".join(names) or "their names are not known"
        return f"{quantity} is first outside of its band {where}\nsamples: {samples}"

    return str(session.perform(start, work))
