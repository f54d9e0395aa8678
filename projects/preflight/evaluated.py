"""The evaluation of a job: what it gives twice, what it changes, and what a model knows of other samples."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from trainkit.projects.preflight.job import Until, digest
from trainkit.projects.preflight.samples import classes_of

from trainkit.engine.hooks import EvalHook
from trainkit.evaluation.evaluator import inference_context
from trainkit.utils.device import device_of, move_to_device, unwrap_model
from trainkit.utils.env import seed_all_rng


class Evaluation(Until):
    """Evaluates twice after the last of some steps, as the job does it, and ends the run.

    Attributes:
        phases: "val" and "test", those that the job has.
        error: what ended an evaluation; "" if nothing did.
        changed: what the first evaluation has changed and not restored.
        different: names of results that the second evaluation has not given again.
        sec, num_batches: phase -> of one evaluation.
    """

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.phases: list[str] = []
        self.error = ""
        self.changed: list[str] = []
        self.different: list[str] = []
        self.sec: dict[str, float] = {}
        self.num_batches: Counter[str] = Counter()

    def before_eval_step(self, phase: Any, index: int, inputs: Any) -> None:
        self.num_batches[phase] += 1

    def at_end(self) -> None:
        hooks = [hook for hook in self.trainer.hooks if isinstance(hook, EvalHook)]
        self.phases = [hook.phase for hook in hooks]
        model = unwrap_model(self.trainer.model)
        before = _parts(model)
        try:
            first = self._evaluate(hooks)
            after = _parts(model)
            self.changed = [name for name in before if before[name] != after[name]]
            torch.set_grad_enabled(True)
            seed_all_rng(self.trainer.cfg.SEED + 1)  # chance would do the same again
            second = self._evaluate(hooks)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"[:300]
            return
        self.num_batches = Counter({name: num // 2 for name, num in self.num_batches.items()})
        for name, value in first.items():
            is_of_the_clock = "time" in name or "_per_sec" in name
            if not is_of_the_clock and not _is_close(value, second[name]):
                self.different.append(name)

    def _evaluate(self, hooks: list[EvalHook]) -> dict[str, float]:
        for hook in hooks:
            hook.evaluated_iters = -1  # it may act again
            start = time.perf_counter()
            hook.act_now()
            self.sec[hook.phase] = time.perf_counter() - start
        latest = self.trainer.storage.latest()
        return {name: value for name, (value, _) in latest.items()}


def _parts(model: nn.Module) -> dict[str, Any]:
    """What an evaluation must leave as it is."""
    return {
        "weights or statistics": digest(model.state_dict()),
        "modes": [module.training for module in model.modules()],
        "which parameters are trained": [value.requires_grad for value in model.parameters()],
        "gradients are off": torch.is_grad_enabled(),
    }


def _is_close(first: float, second: float) -> bool:
    """A GPU may add in another order."""
    if math.isnan(first) and math.isnan(second):
        return True
    return math.isclose(first, second, rel_tol=1e-3, abs_tol=1e-6)


def outputs_differ(model: nn.Module, batch: Any) -> bool:
    """Whether a model in eval mode gives two outputs for one batch."""
    outputs = []
    for seed in range(2):
        seed_all_rng(seed)
        with torch.no_grad(), inference_context(model):
            outputs.append(tree_leaves(model(batch)))
    for first, second in zip(*outputs, strict=False):
        if not isinstance(first, Tensor):
            continue
        if first.shape != second.shape:
            return True
        if first.numel() and not first.is_complex():
            distance = (first.double() - second.double()).abs().max()
            if distance > 0.01 * first.double().abs().max():
                return True
    return len(outputs[0]) != len(outputs[1])


class Answers(NamedTuple):
    """The classes of samples, and those that a model gives them; ``[samples]``."""

    truth: Tensor
    given: Tensor

    @property
    def share(self) -> float:
        return (self.truth == self.given).double().mean().item()

    @property
    def chance(self) -> float:
        """The share that is right if the answers have nothing to do with the samples."""
        of_given = Counter(self.given.tolist())
        of_truth = Counter(self.truth.tolist())
        num_pairs = 0
        for label, number in of_truth.items():
            num_pairs += number * of_given[label]
        return num_pairs / len(self.truth) ** 2

    @property
    def error(self) -> float:
        """The standard error of a share that is right by chance."""
        variance = self.chance * (1 - self.chance)
        return math.sqrt(max(variance, 1 / len(self.truth)) / len(self.truth))

    def is_above_chance(self, num_errors: float) -> bool:
        """Whether more answers are right than by chance, and by so many standard errors."""
        return self.share > self.chance + num_errors * self.error

    def share_of(self, label: int) -> float:
        given = self.given[self.truth == label]
        return (given == label).double().mean().item()


def ask_model(model: nn.Module, batches: list[Any]) -> Answers | None:
    """What a model in eval mode answers; None if the samples have no classes, or the outputs are no scores."""
    truth: list[int] = []
    given: list[Tensor] = []
    with torch.no_grad(), inference_context(model):
        for batch in batches:
            labels = classes_of(batch, ndim=1)
            if not labels:
                return None
            scores = _scores_of(model(batch), len(labels))
            if scores is None:
                return None
            truth += labels
            given.append(scores.argmax(1).cpu())
    if not truth:
        return None
    return Answers(torch.tensor(truth), torch.cat(given))


def _scores_of(outputs: Any, num_samples: int) -> Tensor | None:
    """The one output ``[samples, classes]``."""
    found = []
    for leaf in tree_leaves(outputs):
        is_matrix = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim == 2
        if is_matrix and len(leaf) == num_samples and leaf.shape[1] > 1:
            found.append(leaf)
    return found[0] if len(found) == 1 else None


def confused(train: Answers, val: Answers) -> Iterator[str]:
    """Classes that a model knows in TRAIN, but not in VAL."""
    of_train = Counter(train.truth.tolist())
    of_val = Counter(val.truth.tolist())
    for label in sorted(of_train):
        if of_train[label] >= 10 and of_val[label] >= 10:
            in_train = train.share_of(label)
            in_val = val.share_of(label)
            if in_train >= 0.5 and in_val <= in_train / 4:
                yield f"class {label} ({in_train:.0%} right in TRAIN, {in_val:.0%} in VAL)"


def moved(batches: list[Any], model: nn.Module) -> list[Any]:
    """The batches on the device of a model."""
    device = device_of(model)
    return batches if device is None else [move_to_device(batch, device) for batch in batches]
