"""The losses of a model on an evaluated dataset."""

import logging
import math
import weakref
from collections.abc import Sequence
from typing import Any, cast

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

logger = logging.getLogger(__name__)

# these act randomly in train mode, or update running statistics
_FROZEN_TYPES = (_NormBase, _DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.RReLU)


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

    def bind_loader(self, data_loader: Any) -> None:
        self._count = SampleCounter(self._model, data_loader)

    def reset(self) -> None:
        # name -> of each batch, which may have other losses: the loss times its weight, and the weight
        self._sums: dict[str, list[Tensor]] = {}
        self._weights: dict[str, list[Any]] = {}

    def process(self, inputs: Any, outputs: Any) -> None:
        """Add one batch; raises as `parse_losses`, and ValueError if the model does not return ``weight``."""
        losses = self._losses(inputs)
        self._ask_once(inputs, losses)
        weight: Any
        if self._weight is None:
            weight = self._count(inputs)
        else:
            weight = self._weight_in(losses)
        for name, loss in losses.items():
            product = _wide(loss) * weight
            if self._weight is not None:
                product = product.where(weight > 0, 0.0)  # a mean over no tokens is NaN
            self._sums.setdefault(name, []).append(product)
            self._weights.setdefault(name, []).append(weight)

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
        mine = {}
        for name, products in self._sums.items():
            mine[name] = torch.stack(products).tolist(), _numbers(self._weights[name])
        sums_of: dict[str, list[float]] = {}
        weights_of: dict[str, list[float]] = {}
        for of_rank in comm.all_gather(mine):
            for name, (sums, weights) in of_rank.items():
                sums_of.setdefault(name, []).extend(sums)
                weights_of.setdefault(name, []).extend(weights)
        means = {}
        for name, sums in sums_of.items():
            weights = weights_of[name]
            total = math.fsum(weights)
            if total == 0:
                raise ValueError(
                    f"the weights {self._weight or 'of the batches'} of the loss {name!r} add up to 0 over all batches"
                )
            # fsum rounds once, so neither the order nor the division of batches over processes changes the result
            is_finite = all(math.isfinite(value) for value in sums)
            sum_of_all = math.fsum(sums) if is_finite else sum(sums)
            means[name] = sum_of_all / total
        return {self._task: means} if comm.is_main_process() else {}

    def _weight_in(self, losses: dict[str, Tensor]) -> Tensor:
        """The weight of a batch, which is taken out of ``losses``."""
        weight = losses.pop(str(self._weight), None)
        if weight is None:
            raise ValueError(
                f"weight of LossEvaluator is {self._weight!r}, but the model returns {sorted(losses)}; "
                "return the weight of the batch as an entry, a scalar tensor"
            )
        return _wide(weight)

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
            largest = max(abs(first), abs(second))
            if abs(first - second) > _TOLERANCE * largest:
                text = (
                    "LossEvaluator: %s of one batch is %.6g, and %.6g with other random numbers: no validation loss. "
                    "Freezing modules does not stop F.dropout, stochastic depth or dropout_p of attention; give the "
                    "model a method losses(batch), called in eval mode, without random numbers"
                )
                logger.warning(text, name, first, second)
                return

    def _losses(self, inputs: Any) -> dict[str, Tensor]:
        """``total_loss``, then the single losses; detached. Gradients are on: what requires grad is a loss."""
        with inference_context(self._model), preserve_buffers(self._model), torch.enable_grad():
            losses_of = getattr(self._model, "losses", None)
            if callable(losses_of):
                returned = losses_of(inputs)
            else:
                self._model.train()
                for module in self._model.modules():
                    if isinstance(module, self._frozen_types):
                        module.eval()
                returned = self._model(inputs)
        losses = parse_losses(returned)
        return {"total_loss": losses.total.detach()} | losses.detached


def _wide(value: Tensor) -> Tensor:
    """In float64, but on MPS, which has none."""
    return value.float() if value.device.type == "mps" else value.double()


def _numbers(weights: list[Any]) -> list[float]:
    """Read the device once."""
    if isinstance(weights[0], Tensor):
        return cast(list[float], torch.stack(weights).tolist())
    return weights
