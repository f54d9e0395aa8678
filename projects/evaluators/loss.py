"""The losses of a model on an evaluated dataset."""

import logging
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from trainkit.projects.evaluators.samples import SampleCounter

from trainkit.config.config import CfgNode
from trainkit.config.from_config import configurable
from trainkit.engine.losses import parse_losses
from trainkit.evaluation.build import EVALUATOR_REGISTRY
from trainkit.evaluation.evaluator import (
    DatasetEvaluator,
    KnownResults,
    inference_context,
)
from trainkit.utils import comm
from trainkit.utils.device import preserve_buffers
from trainkit.utils.env import preserve_rng_state, seed_all_rng
from trainkit.utils.events import EventStorage
from trainkit.utils.events.numbers import Numbers

logger = logging.getLogger(__name__)

# these act randomly in train mode, or update running statistics
_FROZEN_TYPES = (_NormBase, _DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.RReLU)

_MOST_WAITING = 100  # batches whose losses are read together, since reading waits for the device

# the models that were asked whether their loss is random
_asked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_OTHER_SEED = 3_735_928_559
_TOLERANCE = 1e-3  # relative; kernels that add in another order differ by less


@EVALUATOR_REGISTRY.register()
class LossEvaluator(DatasetEvaluator):
    """The mean over all samples of each loss that ``model`` returns, and of their sum.

    If ``model`` has a method ``losses(batch)``, it is called in eval mode. Otherwise ``model(batch)`` is called in
    train mode, but modules with running statistics or dropout stay in eval mode (batch and instance norm,
    dropout, recurrent and attention layers, ``freeze``). Functions that the model calls itself are not frozen, such as
    ``F.dropout(x, p, self.training)``: the first batch of a model is computed twice, and a warning names losses that
    differ. Modes and buffers are restored after every batch. As in training, ``total_loss`` is the sum of the entries
    that require grad.

    Args:
        freeze: further classes to keep in eval mode, such as stochastic depth.
        weight: None: each batch counts by its samples, see `SampleCounter`. A name, such as ``num_tokens``: by this
            entry of what the model returns, a scalar tensor >= 0, which is then no result. A batch of weight 0 does
            not count.
        task: the name of the results.
    """

    @configurable
    def __init__(
        self,
        *,
        freeze: Sequence[type[nn.Module]] = (),
        weight: str | None = None,
        task: str = "loss",
    ) -> None:
        if weight is not None and (not isinstance(weight, str) or not weight):
            raise ValueError(f"weight must be the name of an entry, or None, got {weight!r}")
        self._model: Any = None  # until `bind`
        self._modes: list[tuple[nn.Module, bool]] = []  # in which the model gives its losses
        self._with_buffers: list[nn.Module] = []
        self._frozen_types: Any = (*_FROZEN_TYPES, *freeze)
        self._weight = weight
        self._count = SampleCounter()
        self._task = task
        self.reset()

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        return {}

    def bind(self, model: Any) -> None:
        self._model = model
        self._count = SampleCounter(model)
        self._modes = self._find_modes()
        self._with_buffers = []
        for module in model.modules():
            # statistics of a frozen norm do not change
            if not isinstance(module, _NormBase) and any(
                True for _ in module.buffers(recurse=False)
            ):
                self._with_buffers.append(module)

    def _find_modes(self) -> list[tuple[nn.Module, bool]]:
        """The modules in the mode of `_losses`; a model may override ``train()``."""
        with inference_context(self._model):
            if not callable(getattr(self._model, "losses", None)):
                self._model.train()
                for module in self._model.modules():
                    if isinstance(module, self._frozen_types):
                        module.eval()
            return [(module, module.training) for module in self._model.modules()]

    def bind_loader(self, data_loader: Any) -> None:
        self._count = SampleCounter(self._model, data_loader)

    def reset(self) -> None:
        # losses and weights of the newest batches, which may be on a device
        self._waiting: list[tuple[dict[str, Tensor], Any]] = []
        self._sums: dict[str, _ExactSum] = {}  # loss times weight
        self._weights: dict[str, _ExactSum] = {}  # of the batches that have this loss

    def process(self, inputs: Any, outputs: Any) -> None:
        """Add one batch; raises as `parse_losses`, and ValueError if the model does not return ``weight``."""
        losses = self._losses(inputs)
        self._ask_once(inputs, losses)
        weight: Any
        if self._weight is None:
            weight = self._count(inputs)
        else:
            weight = self._weight_in(losses)
        self._waiting.append((losses, weight))
        if len(self._waiting) >= _MOST_WAITING:
            self._add_waiting()

    def _add_waiting(self) -> None:
        values: list[Any] = []
        for losses, weight in self._waiting:
            values += [weight, *losses.values()]
        numbers = iter(Numbers(values).read())
        for losses, _ in self._waiting:
            weight = next(numbers)
            for name in losses:
                loss = next(numbers)
                if name not in self._sums:
                    self._sums[name] = _ExactSum()
                    self._weights[name] = _ExactSum()
                self._weights[name].add(weight)
                if self._weight is None or weight > 0:  # a mean over no tokens is NaN
                    self._sums[name].add(loss * weight)
        self._waiting = []

    def keep_up(self, inputs: Any) -> None:
        """Run the model as often as ``process`` does; see `trainkit.projects.sharding.fsdp`."""
        self._ask_once(inputs, self._losses(inputs))

    def known_results(self) -> KnownResults | None:
        if type(self).evaluate is not LossEvaluator.evaluate:
            return None  # a subclass that may report something else
        return {self._task: None}

    def evaluate(self) -> dict[str, Any]:
        """``{task: {"total_loss": mean, <name>: mean, ...}}`` over all ranks, with the names of a dict; on rank 0.

        Raises:
            ValueError: the weights of a loss add up to 0.
        """
        self._add_waiting()
        sums = _over_ranks(self._sums)
        weights = _over_ranks(self._weights)
        means = {}
        for name in sums:
            total = float(weights[name])
            if total == 0:
                raise ValueError(
                    f"the weights {self._weight or 'of the batches'} of the loss {name!r} add "
                    "up to 0 over all batches"
                )
            means[name] = float(sums[name]) / total
        return {self._task: means} if comm.is_main_process() else {}

    def _weight_in(self, losses: dict[str, Tensor]) -> Tensor:
        """The weight of a batch, which is taken out of ``losses``."""
        weight = losses.pop(str(self._weight), None)
        if weight is None:
            raise ValueError(
                f"weight of LossEvaluator is {self._weight!r}, but the model returns "
                f"{sorted(losses)}; "
                "return the weight of the batch as an entry, a scalar tensor"
            )
        return weight

    def _ask_once(self, inputs: Any, losses: dict[str, Tensor]) -> None:
        """Warn if another random state gives another loss; each model is asked once."""
        if self._model in _asked:
            return
        _asked.add(self._model)
        with EventStorage(), preserve_rng_state():
            seed_all_rng(_OTHER_SEED)
            again = self._losses(inputs)
        for name, loss in losses.items():
            first = loss.item()
            second = again[name].item() if name in again else math.nan
            if abs(first - second) > _TOLERANCE * max(abs(first), abs(second)):
                text = (
                    "LossEvaluator: %s of one batch is %.6g, and %.6g with other random "
                    "numbers: no validation loss. "
                    "Freezing modules does not stop F.dropout, stochastic depth or dropout_p "
                    "of attention; give the "
                    "model a method losses(batch), called in eval mode, without random numbers"
                )
                logger.warning(text, name, first, second)
                return

    def _losses(self, inputs: Any) -> dict[str, Tensor]:
        """``total_loss``, then the single losses; detached. Gradients are on: what requires grad is a loss."""
        with self._mode_for_losses(), preserve_buffers(self._with_buffers), torch.enable_grad():
            losses_of = getattr(self._model, "losses", None)
            if callable(losses_of):
                returned = losses_of(inputs)
            else:
                returned = self._model(inputs)
            losses = parse_losses(returned)
            values = {"total_loss": losses.total, **losses}
            for name, value in values.items():
                # without a graph it may be a buffer
                is_result = value.grad_fn is not None
                values[name] = value.detach() if is_result else value.detach().clone()
        return values

    @contextmanager
    def _mode_for_losses(self) -> Iterator[None]:
        """Context in which the modules have the modes of `_find_modes`."""
        changed = []
        for module, training in self._modes:
            if module.training != training:
                changed.append(module)
                _set_mode(module, training)
        try:
            yield
        finally:
            for module in changed:
                _set_mode(module, not module.training)


def _set_mode(module: nn.Module, training: bool) -> None:
    # as in the constructor of Module: its own __setattr__ first looks for parameters, which takes ten times as long
    object.__setattr__(module, "training", training)


class _ExactSum:
    """A sum that is rounded once, in `float`, so neither the order nor the parts of several processes change it."""

    def __init__(self) -> None:
        self._exact = Fraction(0)  # of the finite values
        self._not_finite = 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self._exact += Fraction(value)
        else:
            self._not_finite += value

    def merge(self, other: "_ExactSum") -> None:
        self._exact += other._exact
        self._not_finite += other._not_finite

    def __float__(self) -> float:
        try:
            return float(self._exact) + self._not_finite
        except OverflowError:
            return (math.inf if self._exact > 0 else -math.inf) + self._not_finite


def _over_ranks(sums: dict[str, _ExactSum]) -> dict[str, _ExactSum]:
    """The sums of all ranks, which may have other names."""
    merged: dict[str, _ExactSum] = {}
    for of_rank in comm.all_gather(sums):
        for name, its_sum in of_rank.items():
            merged.setdefault(name, _ExactSum()).merge(its_sum)
    return merged
