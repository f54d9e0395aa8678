"""The hook that inspects one step (it changes no bit of the run), and the report of a replay."""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from trainkit.projects.replay.failure import (
    Comparison,
    Failure,
    describe_error,
    without_process,
)

from trainkit.checkpoint.differences import CLOCK_READINGS
from trainkit.engine.finite import non_finite_names
from trainkit.engine.hook_base import HookBase
from trainkit.utils.device import unwrap_model
from trainkit.utils.logger import format_table

Part = tuple[str, str]  # a part of a step, and its digest
_BEFORE_THE_STEP = "before the step"


class Inspection(HookBase):
    """Inspect a step. Register this hook last, make only one step with it, then call ``close``.

    A step that a subclass makes by itself (``run_step``) is inspected too: all modules and optimizers that are
    attributes of the trainer, and the batches that it draws from a `ResumableLoader`.

    Attributes:
        parts: the name and the digest of each part of the step, in the order of computation.
        outputs: (module, largest absolute value of its output), in the order in which the calls end.
        batches, samples: the micro-batches as the model gets them, and the names of the samples of each.
        drawn: the batches that loaders give in this step.
        losses: if the trainer does not know them, the values that are logged in this iteration.
        gradients: before clipping; with several optimizers, those that each uses.
        first_bad_module: whose output is the first one that is not finite; ``error``: of the step; "" if there is none.
        failure: the error as the run would have recorded it.
    """

    def __init__(self, samples: Sequence[list[str]] = ()) -> None:
        self.parts: list[Part] = []
        self.outputs: list[tuple[str, float]] = []
        self.batches: list[Any] = []
        self.samples = [*samples]
        self.drawn: list[Any] = []
        self.is_own_step = False
        self.losses: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.not_finite_before: list[str] = []
        self.first_bad_module = ""
        self.error = ""
        self.failure: Failure | None = None
        # number of its micro-batch, and the output itself
        self._first_bad: tuple[int, list[Tensor]] = (0, [])
        self._handles: list[Any] = []
        self._depth = 0  # of calls of modules
        # when the present forward pass began
        self._num_parts = 0
        self._num_outputs = 0

    def before_step(self) -> None:
        self.drawn.clear()
        step = self.trainer._trainer
        if hasattr(step, "forget_recordings"):
            # of a graph: an ordinary step has the same bits, and a recording calls no modules
            step.forget_recordings()
        self._models, optimizers = _parts_of(self.trainer)
        self.not_finite_before = []
        for model, prefix in self._models.items():
            self.not_finite_before += [f"{prefix}{name}" for name in non_finite_names(model)]
        self._see_models(_BEFORE_THE_STEP)
        for optimizer, prefix in optimizers.items():
            name = f"{prefix}optimizer {_BEFORE_THE_STEP}"
            self.parts.append((name, digest(optimizer.state_dict())))
            if hasattr(optimizer, "register_step_pre_hook"):
                handle = optimizer.register_step_pre_hook(
                    lambda used, *_: self._keep_gradients(used)
                )
                self._handles.append(handle)
        for model, prefix in self._models.items():
            for path, module in model.named_modules():
                self._watch(module, f"{prefix}{path}" or "(model)")

    def _watch(self, module: nn.Module, name: str) -> None:
        enter = partial(self._enter, name)
        leave = partial(self._leave, name)
        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave))

    def _see_models(self, when: str) -> None:
        for model, prefix in self._models.items():
            self.parts.append((f"{prefix}model {when}", digest(model.state_dict())))

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._depth == 0:
            self._see_batch(is_pass=name == "(model)")
        self._depth += 1
        text = f"input of the module {name}, though the modules that were called before it agree"
        self.parts.append((text, digest((args, kwargs))))

    def _see_batch(self, is_pass: bool) -> None:
        loader: Any = self.trainer.data_loader
        try:
            batch = self.trainer.batch
            num_drawn = self.trainer.feed.drawn
        except AttributeError:
            self.is_own_step = True
            batch = self.drawn[-1] if self.drawn else None
            num_drawn = 1
        if batch is not None and (not self.batches or self.batches[-1] is not batch):
            self.batches.append(batch)
            self.parts.append(("batch", digest(batch)))
            self._num_parts = len(self.parts)
            self._num_outputs = len(self.outputs)
        elif is_pass and not self.is_own_step:
            # the last one was to order the buckets of DDP
            del self.parts[self._num_parts :]
            del self.outputs[self._num_outputs :]
        if hasattr(loader, "names_of_last") and self.batches:
            # it may be ahead of the micro-batches
            names = loader.names_of_last(num_drawn)[: len(self.batches)]
            self.samples = names or self.samples

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        self.parts.append((f"module {name}: equal inputs and different outputs", digest(output)))
        values = [*floating_tensors(output)]
        if not values:
            return
        of_each = [value.abs().max().item() for value in values]
        largest = torch.tensor(of_each, dtype=torch.float64).max().item()  # or NaN
        self.outputs.append((name, largest))
        if not self.first_bad_module and not math.isfinite(largest):
            self.first_bad_module = name
            copies = [value.clone() for value in values]
            self._first_bad = len(self.batches) - 1, copies

    def _keep_gradients(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Those that are not kept yet: of all parameters before clipping (``after_backward``), or of an optimizer."""
        updated: set[int] = set()
        if optimizer is not None:
            for group in optimizer.param_groups:
                updated |= {id(parameter) for parameter in group["params"]}
        for model, prefix in self._models.items():
            for name, parameter in model.named_parameters():
                is_asked_for = optimizer is None or id(parameter) in updated
                if parameter.grad is not None and is_asked_for:
                    self.gradients.setdefault(f"{prefix}{name}", parameter.grad.detach().clone())

    def after_backward(self) -> None:
        self._keep_gradients()
        with contextlib.suppress(AttributeError):  # the trainer makes its steps itself
            losses = self.trainer.losses
            self.losses = {name: loss.detach().clone() for name, loss in losses.items()}

    def after_step(self) -> None:
        self.close()
        self._see_models("after the update")

    def close(self) -> None:
        """Note the last parts of the step, or if it has failed those that exist."""
        if not self._handles:
            return
        while self._handles:
            self._handles.pop().remove()
        if not self.losses:
            with contextlib.suppress(AttributeError):
                # the backward pass is done, and an earlier hook has failed after it
                _ = self.trainer.losses
                self.after_backward()
        if not self.losses:
            for name, (value, iter) in self.trainer.storage.latest().items():
                if name not in CLOCK_READINGS and iter == self.trainer.iter:
                    self.losses[name] = torch.tensor(value)
        for name, loss in self.losses.items():
            self.parts.append((f"loss {name}", digest(loss)))
        for name, gradient in self.gradients.items():
            self.parts.append((f"gradient of {name}", digest(gradient)))

    def note_failure(self, error: Exception | None, failure: Failure | None) -> None:
        """Call after ``close`` with the error of the step, if it has failed."""
        if error is None or failure is None:
            return
        self.failure = failure
        notes = getattr(error, "__notes__", [])
        self.error = "; ".join([describe_error(error), *notes])
        self.parts.append(("error", digest(without_process(failure.error))))

    def names_of(self, number: int) -> list[str]:
        """The names of the samples of a micro-batch; none if they are not known."""
        known = self.samples[number:]
        return known[0] if known else []

    @property
    def bad_samples(self) -> list[str]:
        """The names of the samples of the batch with values that are not finite."""
        found: list[str] = []
        for number, batch in enumerate(self.batches):
            names = self.names_of(number)
            is_list = isinstance(batch, list) and not any(
                isinstance(each, Tensor) for each in batch
            )
            is_list_of_samples = is_list and len(batch) == len(names)
            for path, value in _leaves(batch):
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    continue
                if value.isfinite().all():
                    continue
                if is_list_of_samples:
                    found.append(names[path[0]])
                else:
                    found += _bad_names(value, names) or ["one without a name"]
        return [*dict.fromkeys(found)]

    @property
    def samples_of_first_bad_output(self) -> list[str]:
        """The samples that are not finite in the first bad output, if its first dimension is the sample."""
        number, values = self._first_bad
        names = self.names_of(number)
        found: list[str] = []
        for value in values:
            found += _bad_names(value, names)
        return found


def _parts_of(trainer: Any) -> tuple[dict[nn.Module, str], dict[Any, str]]:
    """The models and the optimizers of a trainer, each with the start of its names: "" for ``trainer.model``."""
    models: dict[nn.Module, str] = {unwrap_model(trainer.model): ""}
    optimizers: dict[Any, str] = {trainer.optimizer: ""}
    for name, value in vars(trainer).items():
        if isinstance(value, torch.optim.Optimizer):
            optimizers.setdefault(value, f"{name}.")
        if isinstance(value, nn.Module):
            module = unwrap_model(value)
            is_part = any(module in {*model.modules()} for model in models)
            if not is_part:
                models[module] = f"{name}."
    return models, optimizers


def _bad_names(value: Tensor, names: Sequence[str]) -> list[str]:
    """The names of the samples whose rows are not finite; none if there is no row for each sample."""
    finite = value.isfinite()
    if value.dim() > 1:
        finite = finite.flatten(1).all(1)
    if finite.shape != (len(names),):
        return []
    return [name for name, good in zip(names, finite.tolist(), strict=True) if not good]


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The tensors and plain values in nested containers and objects, each with its path."""
    is_object = hasattr(value, "__dict__") and not callable(value)
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    elif is_object and not isinstance(value, Mapping | Tensor):
        value = vars(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, Tensor | str | int | float | None):
        yield path, value


def floating_tensors(value: Any) -> Iterator[Tensor]:
    for _, leaf in _leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            yield leaf.detach()


def digest(value: Any) -> str:
    """The digest of all bits of the tensors in ``value``, and of its plain values."""
    found = hashlib.blake2b(digest_size=8)
    for path, leaf in _leaves(value):
        if isinstance(leaf, Tensor):
            tensor = leaf.detach().to_dense().resolve_conj().contiguous().cpu()
            bits = tensor.reshape(-1, 1).view(torch.uint8)
            found.update(bits.numpy().tobytes())
            leaf = f"{tensor.dtype}{list(tensor.shape)}"
        found.update(f"{path}{leaf!r}".encode())
    return found.hexdigest()


def find_difference(first: Sequence[Part], second: Sequence[Part]) -> str:
    """The first part in which two executions of a step differ; "" if they are equal."""
    for left, right in zip_longest(first, second, fillvalue=("end", "")):
        if left[0] != right[0]:
            return f"the order of its parts, where one has the {left[0]}, the other the {right[0]}"
        if left != right:
            return f"the {left[0]}"
    return ""


@dataclass
class Replay:
    """A step that was performed again. ``str()`` of it is the report.

    Attributes:
        start: the name of the checkpoint from which the replay started, ``num_before`` iterations before the step.
        differences: the settings, code, versions, machine and processes that differ from those of the run.
        inspection: that of this rank. What one asks for most is here too: ``batch`` (a list of several micro-batches),
            ``losses``, ``gradients``, ``samples`` (names), ``first_bad_module``, ``error``.
        changed_files: the files of the batch of this rank that have changed since the run.
        findings: the faults that each rank has found: name -> text.
        failure, samples_at_fault, on_the_way, proof, verdict: texts of the report; "" if there is nothing to say.
        is_equal: whether the replay equals the run, and all executions are equal, as far as they were compared.
    """

    run: str
    iteration: int
    start: str
    num_before: int
    differences: list[str]
    inspection: Inspection
    changed_files: list[str] = field(default_factory=list)
    findings: list[dict[str, str]] = field(default_factory=list)
    failure: str = ""
    samples_at_fault: str = ""
    on_the_way: str = ""
    proof: str = ""
    verdict: str = ""
    is_equal: bool = True

    def __post_init__(self) -> None:
        seen = self.inspection
        self.batch: Any = seen.batches
        if len(seen.batches) <= 1:
            self.batch = seen.batches[0] if seen.batches else None
        self.losses = seen.losses
        self.gradients = seen.gradients
        self.samples = [*chain(*seen.samples)]
        self.error = seen.error
        self.first_bad_module = seen.first_bad_module

    @property
    def first_bad_gradient(self) -> str:
        """The first parameter, in the order of the backward pass, whose gradient is not finite; "" if there is none."""
        for name, gradient in reversed(self.gradients.items()):
            if not gradient.isfinite().all():
                return name
        return ""

    def find(self) -> dict[str, str]:
        """The faults on this rank: name -> text."""
        found = {
            "the step has failed": self.error.partition(". ")[0],
            "files of the batch that have changed since the run": _shortened(self.changed_files),
            "not finite before the step": _shortened(self.inspection.not_finite_before),
            "samples that are not finite": _shortened(self.inspection.bad_samples),
            "first module whose output is not finite": self.first_bad_module,
            "  for": _shortened(self.inspection.samples_of_first_bad_output),
            "first gradient that is not finite": self.first_bad_gradient,
        }
        return {name: text for name, text in found.items() if text}

    def __str__(self) -> str:
        num_before = self.num_before
        title = f"Iteration {self.iteration} of {self.run}, "
        title += f"from {self.start} and {num_before} iterations after it"
        lines = [title, ""]
        lines += [f"not as in the run: {text}" for text in self.differences]
        if not self.differences:
            lines.append("settings, code, versions and machine are as in the run")
        losses = [(name, loss.item()) for name, loss in self.losses.items()]
        norms = []
        for name, gradient in self.gradients.items():
            norms.append((name, gradient.float().norm().item()))
        lines += [
            _table(("batch", "shape", "dtype", "min", "max"), self._fields()),
            _table(("loss", "value"), losses),
            _table(("module", "largest output"), self.inspection.outputs),
            _table(("parameter", "gradient's norm"), norms),
            "",
            f"{len(self.samples)} samples: {_shortened(self.samples)}",
        ]
        for rank, faults in enumerate(self.findings):
            if faults and len(self.findings) > 1:
                lines.append(f"rank {rank}:")
            lines += [f"{name}: {text}" for name, text in faults.items()]
        texts = {
            "failure": self.failure,
            "samples": self.samples_at_fault,
            "on the way": self.on_the_way,
            "proof": self.proof,
            "verdict": self.verdict,
        }
        lines += [f"{name}: {text}" for name, text in texts.items() if text]
        return "\n".join(lines)

    def _fields(self) -> Iterator[tuple[Any, ...]]:
        """Name, shape, dtype, minimum and maximum of each tensor of the batch."""
        for path, value in _leaves(self.batch):
            if not isinstance(value, Tensor):
                continue
            name = "/".join(map(str, path))
            smallest = largest = None
            if value.numel() and not value.is_complex():
                limits = value.aminmax()
                smallest = limits.min.item()
                largest = limits.max.item()
            yield name, [*value.shape], str(value.dtype), smallest, largest


def _table(names: Sequence[str], rows: Any) -> str:
    table = format_table(rows, names, floatfmt=".4g", missingval="-")
    return f"\n{table}"


def _shortened(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more there are."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


# by whether all bits are equal in this process, and in a new one (None: it was not repeated there)
_VERDICTS = {
    (False, None): "transient, or with a state that no checkpoint holds",
    (
        False,
        True,
    ): "with a state that no checkpoint holds (a counter, a cache, an iterator), or by chance",
    (False, False): "transient (hardware, a race, a clock, random numbers of another source)",
    (True, False): (
        "other in each process (the order of a set, an address, the environment), or by chance"
    ),
}
# if the way to the step, which was repeated in this process too, differs there
_ON_THE_WAY = (
    "differs on the way (before the step: chance, a clock, a state that no checkpoint holds)"
)
# if they are equal, by whether the values equal those of the run (None: nothing of the data was compared)
_AGAINST_THE_RUN = {
    True: "reproducible",
    False: (
        "different from the run, which has stored other values (another machine or code, "
        "a state that no checkpoint holds, chance)"
    ),
    None: (
        "reproducible, but not compared with the run, which has stored no value of the data "
        "(--prove compares)"
    ),
}
# by how the failure of the run compares with that of the replay
_OF_THE_FAILURE: dict[Comparison, str] = {
    "has not come back": "the failure has not come back",
    "only here": "the failure is not that of the run, which has done this step",
}
_CAUSES = (
    "a counter in the model or the data set that is no buffer, a loader worker that goes bad, "
    "a clock, chance, another machine or code"
)


def is_on_the_way(first: Inspection, elsewhere: list[Part] | str | Exception) -> bool:
    """Whether a new process differs before the step, or does not reach it."""
    if isinstance(elsewhere, list):
        return find_difference(first.parts, elsewhere).endswith(_BEFORE_THE_STEP)
    return isinstance(elsewhere, Exception)


def judge(
    first: Inspection,
    again: Inspection,
    elsewhere: list[Part] | str | Exception,
    equals_run: bool | None,
    failure: Comparison = "not known",
    from_start: Inspection | Exception | None = None,
) -> tuple[str, bool]:
    """Whether the executions of a step agree with each other, and with what the run has stored.

    Args:
        first, again: two executions in this process.
        elsewhere: the parts of one in a new process, why there was none, or how the process has failed.
        equals_run: whether the values are those of the run; None: none was compared.
        failure: whether the step fails as in the run.
        from_start: one more in this process, with all iterations from the checkpoint on, or how it has
            failed; None: it is not needed, see `is_on_the_way`.

    Returns:
        The verdict as text, and whether everything is equal, as far as it was compared.
    """
    difference = find_difference(first.parts, again.parts)
    is_equal_here = not difference
    here = "repeated in this process, every bit is equal"
    if difference:
        here = f"in this process it differs in {difference}"
    is_equal_there: bool | None = None
    if isinstance(elsewhere, str):
        there = f"not repeated in a new process: {elsewhere}"
    elif isinstance(elsewhere, Exception):
        there = str(elsewhere)
        is_equal_there = False
    else:
        difference = find_difference(first.parts, elsewhere)
        there = "in a new process, every bit is equal"
        if difference:
            there = f"in a new process it differs in {difference}"
        is_equal_there = not difference
    is_same_way = True
    if isinstance(from_start, Exception):
        here = f"{here}, but from the checkpoint on it has failed: {from_start}"
        is_same_way = False
    elif from_start is not None:
        difference = find_difference(first.parts, from_start.parts)
        is_same_way = not difference
        if difference:
            here = f"{here}, but from the checkpoint on it differs in {difference}"

    if is_equal_here and is_equal_there is not False:
        kind = _AGAINST_THE_RUN[equals_run]
        is_equal = equals_run is not False
    elif is_equal_here and not is_same_way:
        kind = _ON_THE_WAY
        is_equal = False
    else:
        kind = _VERDICTS[is_equal_here, is_equal_there]
        is_equal = False
    if failure in _OF_THE_FAILURE:
        # executions that differ say more about the cause than a list
        cause = _CAUSES if is_equal else kind
        kind = f"{_OF_THE_FAILURE[failure]} ({cause})"
        is_equal = False
    return f"{kind}: {here}; {there}", is_equal
