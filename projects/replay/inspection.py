"""The hook that inspects one step: its batch, losses, modules, gradients and updates. It changes no bit of the run."""

import contextlib
import hashlib
import itertools
import pdb
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from trainkit.projects.replay.contents import CLOCK_READINGS

from trainkit.engine.hook_base import HookBase
from trainkit.utils.device import unwrap_model
from trainkit.utils.losses import non_finite_names


class Output(NamedTuple):
    """One call of a module: statistics of its floating point output."""

    module: str
    mean: float | None
    std: float | None
    max_abs: float | None
    zeros_pct: float | None
    is_finite: bool


class Update(NamedTuple):
    """The update of one parameter. ``ratio``: norm of the update / norm of the weights; None if one is missing."""

    parameter: str
    grad_norm: float | None
    grad_is_finite: bool
    ratio: float | None


class Field(NamedTuple):
    """A tensor of a batch. ``bad_samples``: the names of samples with values that are not finite."""

    name: str
    shape: list[int]
    dtype: str
    minimum: float | None
    maximum: float | None
    bad_samples: list[str]


Part = tuple[str, str]  # a part of a step, and its digest


class Inspection(HookBase):
    """Inspect the step of iteration ``at``. Register this hook last, train only once with it, then call ``close``.

    A step that a subclass makes by itself (``run_step``) is inspected too: all modules and optimizers that are
    attributes of the trainer, and the batches that it draws from a `ResumableLoader`.

    Attributes:
        batch: the batch as the model gets it; a list of several micro-batches. If the trainer does not know it, the
            batch that was drawn.
        drawn: gets the batches that loaders give in this step.
        samples: the names of the samples of each micro-batch; empty if the loader does not know them.
        losses, gradients: copies of the losses, and of the gradients before clipping. If the trainer does not know its
            losses, the values that are logged in this iteration; with several optimizers, the gradients that each uses.
        parts: the name and the digest of each part of the step, in the order of computation.
    """

    def __init__(self, at: int, debug: bool = False) -> None:
        self.at, self._debug, self._num_passes = at, debug, 0
        self._handles: list[Any] = []
        self._before: dict[str, Tensor] = {}
        self._depth = 0  # of calls of modules
        self._parts_before: list[Part] = []
        self._parts_of_modules: list[Part] = []
        self._parts_after: list[Part] = []
        self._outputs: list[Output] = []
        # for each forward pass of the trainer's model: the numbers of parts and outputs before it
        self._passes: list[tuple[int, int]] = []
        self._first_bad: tuple[int, list[Tensor]] | None = None  # number of the pass; where the output is finite
        self._batches: list[Any] = []
        self.drawn: list[Any] = []
        self.samples: list[list[str]] = []
        self.losses: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.updates: list[Update] = []
        self.not_finite_before: list[str] = []

    @property
    def batch(self) -> Any:
        """The batch as the model gets it; a list of several micro-batches."""
        return self._batches if len(self._batches) > 1 else next(iter(self._batches), None)

    @property
    def outputs(self) -> list[Output]:
        """An `Output` for each call of a module, in the order in which the calls end."""
        return self._outputs[self._first_pass()[1] :]

    @property
    def parts(self) -> list[Part]:
        return [*self._parts_before, *self._parts_of_modules[self._first_pass()[0] :], *self._parts_after]

    def _first_pass(self) -> tuple[int, int]:
        """Where the passes of the step start: DDP may do a first pass for its buckets."""
        return self._passes[-self._num_passes] if 0 < self._num_passes <= len(self._passes) else (0, 0)

    def before_step(self) -> None:
        if self.trainer.iter != self.at:
            return
        self.drawn.clear()
        step: Any = getattr(self.trainer, "_trainer", None)
        if hasattr(step, "forget_recordings"):
            step.forget_recordings()  # makes an ordinary step, with the same bits: a recording calls no modules
        self._models, self._optimizers = _parts_of(self.trainer)
        self.not_finite_before = [f"{p}{n}" for model, p in self._models.items() for n in non_finite_names(model)]
        self._before = {name: p.detach().clone() for name, p in self._parameters()}
        self._parts_before = self._digests_of_models("before the step")
        for optimizer, prefix in self._optimizers.items():
            self._parts_before.append((f"{prefix}optimizer before the step", digest(optimizer.state_dict())))
            if hasattr(optimizer, "register_step_pre_hook"):
                self._handles.append(optimizer.register_step_pre_hook(lambda used, *_: self._keep_gradients(used)))
        for model, prefix in self._models.items():
            for name, module in model.named_modules():
                name = f"{prefix}{name}" or "(model)"
                self._handles.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                self._handles.append(module.register_forward_hook(partial(self._leave, name)))

    def _digests_of_models(self, when: str) -> list[Part]:
        return [(f"{prefix}model {when}", digest(model.state_dict())) for model, prefix in self._models.items()]

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for model, prefix in self._models.items():
            yield from ((f"{prefix}{name}", parameter) for name, parameter in model.named_parameters())

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._depth == 0:
            if name == "(model)":
                self._passes.append((len(self._parts_of_modules), len(self._outputs)))
            self._see_batch()
            if self._debug:
                self._debug = False
                pdb.set_trace()  # "up" leads to the call of the model, "step" into its forward pass
        self._depth += 1
        text = f"input of the module {name}, though the modules that were called before it agree"
        self._parts_of_modules.append((text, digest((args, kwargs))))

    def _see_batch(self) -> None:
        trainer = self.trainer
        try:
            batch, drawn = trainer.batch, trainer.feed.drawn
            is_known = True
        except RuntimeError:  # the trainer makes its steps itself
            batch, drawn, is_known = self.drawn[-1] if self.drawn else None, 1, False
        if batch is not None and (not self._batches or self._batches[-1] is not batch):
            self._batches.append(batch)
            self._parts_before.append(("batch", digest(batch)))
        self._num_passes = len(self._batches) if is_known else 0
        if hasattr(trainer.data_loader, "names_of_last") and self._batches:  # it may be ahead of the micro-batches
            self.samples = trainer.data_loader.names_of_last(drawn)[: len(self._batches)]

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        self._parts_of_modules.append((f"module {name}: equal inputs and different outputs", digest(output)))
        values = [*floating_tensors(output)]
        statistics = _describe(values) if values else (None, None, None, None, True)
        self._outputs.append(Output(name, *statistics))
        if not statistics[-1] and self._first_bad is None:
            self._first_bad = len(self._passes), [value.isfinite() for value in values]

    def _keep_gradients(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Those that are not kept yet: of all parameters before clipping (``after_backward``), or of an optimizer."""
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer else None
        for name, parameter in self._parameters():
            is_used = updated is None or id(parameter) in updated
            if is_used and parameter.grad is not None and name not in self.gradients:
                self.gradients[name] = parameter.grad.detach().clone()

    def after_backward(self) -> None:
        if self.trainer.iter == self.at:
            self._keep_gradients()
            with contextlib.suppress(RuntimeError):  # the trainer makes its steps itself
                self.losses = {name: loss.detach().clone() for name, loss in self.trainer.losses.items()}

    def after_step(self) -> None:
        if self.trainer.iter == self.at:
            if not self.losses:
                latest = self.trainer.storage.latest().items()
                self.losses = {n: torch.tensor(v) for n, (v, i) in latest if i == self.at and n not in CLOCK_READINGS}
            self._measure(has_updated=True)

    def close(self) -> None:
        """If the step has failed, measure those of its parts that exist."""
        if self._handles:
            with contextlib.suppress(RuntimeError):
                _ = self.trainer.losses  # the backward pass is done, and an earlier hook may have failed after it
                self.after_backward()
            self._measure(has_updated=False)

    @torch.no_grad()
    def _measure(self, has_updated: bool) -> None:
        """Describe the gradients and the update; ends the inspection."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._parts_after = [(f"loss {name}", digest(loss)) for name, loss in self.losses.items()]
        self._parts_after += [(f"gradient of {name}", digest(grad)) for name, grad in self.gradients.items()]
        if has_updated:
            self._parts_after += self._digests_of_models("after the update")
        for name, parameter in self._parameters():
            grad, before, ratio = self.gradients.get(name), self._before.get(name), None
            if has_updated and before is not None and before.any():
                ratio = ((parameter - before).norm() / before.norm()).item()
            norm = None if grad is None else grad.float().norm().item()
            self.updates.append(Update(name, norm, grad is None or bool(grad.isfinite().all()), ratio))
        self._before = {}

    def samples_of_first_bad_output(self) -> list[str]:
        """The samples that are not finite in the first output that is not finite.

        Empty if the first dimension of this output is not the sample.
        """
        number, finite = self._first_bad or (0, [])
        samples = [*reversed(self.samples)][len(self._passes) - number :][:1]
        rows = [value for value in finite if samples and value.dim() and len(value) == len(samples[0])]
        return [name for value in rows for name in _bad_names(value, samples[0])]

    def fields(self) -> list[Field]:
        """The tensors of the batch."""
        batches = self._batches
        fields = []
        for number, batch in enumerate(batches):
            prefix = f"{number}: " if len(batches) > 1 else ""
            samples = self.samples[number] if number < len(self.samples) else []
            for path, tensor in _leaves(batch):
                if not isinstance(tensor, Tensor):
                    continue
                bad = _bad_rows(tensor, path, isinstance(batch, list), samples)
                is_number = tensor.numel() and not tensor.is_complex()
                low, high = (end.item() for end in tensor.detach().aminmax()) if is_number else (None, None)
                name = prefix + "/".join(map(str, path))
                dtype = str(tensor.dtype).removeprefix("torch.")
                fields.append(Field(name, [*tensor.shape], dtype, low, high, bad))
        return fields


def _parts_of(trainer: Any) -> tuple[dict[nn.Module, str], dict[Any, str]]:
    """The models and the optimizers of a trainer, each with the start of its names: "" for ``trainer.model``."""
    models, optimizers = {unwrap_model(trainer.model): ""}, {trainer.optimizer: ""}
    for name, value in trainer.__dict__.items():
        if isinstance(value, nn.Module) and all(unwrap_model(value) not in {*model.modules()} for model in models):
            models[unwrap_model(value)] = f"{name}."
        elif isinstance(value, torch.optim.Optimizer):
            optimizers.setdefault(value, f"{name}.")
    return models, optimizers


def _bad_rows(tensor: Tensor, path: tuple[Any, ...], is_list: bool, samples: list[str]) -> list[str]:
    if not tensor.is_floating_point() or tensor.isfinite().all():
        return []
    if is_list and path[0] < len(samples):  # the batch is a list of samples
        return [samples[path[0]]]
    if tensor.dim() and len(tensor) == len(samples):
        return _bad_names(tensor.isfinite(), samples)
    return [f"one of {len(samples)} samples" if samples else "a sample without a name"]


def _bad_names(finite: Tensor, samples: list[str]) -> list[str]:
    """The names of the samples whose rows are not all True."""
    rows = finite.flatten(1).all(1) if finite.dim() > 1 else finite
    return [sample for sample, good in zip(samples, rows.tolist(), strict=True) if not good]


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The tensors and plain values in nested containers and objects, each with its path."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    elif not isinstance(value, Mapping | Tensor) and hasattr(value, "__dict__") and not callable(value):
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


def _describe(tensors: list[Tensor]) -> tuple[float | None, float | None, float | None, float | None, bool]:
    """Mean, standard deviation, largest absolute value, percent of zeros, whether all are finite."""
    values = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
    spread, zeros = values.std(correction=0), 100 * (values == 0).float().mean()
    numbers = torch.stack([values.mean(), spread, values.abs().max(), zeros, values.isfinite().all().float()]).tolist()
    return numbers[0], numbers[1], numbers[2], numbers[3], bool(numbers[4])


def digest(value: Any) -> str:
    """The digest of all bits of the tensors in ``value``, and of its plain values."""
    found = hashlib.blake2b(digest_size=8)
    for path, leaf in _leaves(value):
        found.update(repr(path).encode())
        if isinstance(leaf, Tensor):
            tensor = leaf.detach().to_dense().resolve_conj().contiguous().cpu()
            found.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            found.update(tensor.reshape(-1, 1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def find_difference(first: Sequence[Part], second: Sequence[Part]) -> str:
    """The first part in which two executions of a step differ; "" if they are equal."""
    for left, right in itertools.zip_longest(first, second, fillvalue=("end", "")):
        if left[0] != right[0]:
            return f"the order of its parts, where one has the {left[0]}, the other the {right[0]}"
        if left != right:
            return f"the {left[0]}"
    return ""
