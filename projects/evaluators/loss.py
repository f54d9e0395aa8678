"""The losses of a model on an evaluated dataset."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from trainkit.projects.evaluators.counting import num_samples

from trainkit.config.config import CfgNode
from trainkit.config.from_config import configurable
from trainkit.evaluation.build import EVALUATOR_REGISTRY
from trainkit.evaluation.evaluator import DatasetEvaluator, inference_context
from trainkit.utils import comm
from trainkit.utils.device import preserve_buffers
from trainkit.utils.losses import parse_losses

# these act randomly in train mode, or update running statistics
_FROZEN_TYPES = (_NormBase, _DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.RReLU)


@EVALUATOR_REGISTRY.register()
class LossEvaluator(DatasetEvaluator):
    """The mean over all samples of each loss that ``model`` returns, and of their sum.

    If ``model`` has a method ``losses(batch)``, it is called in eval mode. Otherwise ``model(batch)`` is called in
    train mode, but modules with running statistics or dropout stay in eval mode (batch and instance norm,
    dropout, recurrent and attention layers, ``freeze``). Modes and buffers are restored after every batch. As in
    training, ``total_loss`` is the sum of the entries that require grad. Each batch counts by its samples. ``freeze``
    names further classes to keep in eval mode, such as stochastic depth.
    """

    @configurable
    def __init__(self, *, freeze: Sequence[type[nn.Module]] = (), task: str = "loss") -> None:
        self._model: Any = None  # until `bind`
        self._frozen_types: Any = (*_FROZEN_TYPES, *freeze)
        self._task = task
        self.reset()

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        return {}

    def bind(self, model: Any) -> None:
        self._model = model

    def reset(self) -> None:
        self._sums: dict[
            str, list[Tensor]
        ] = {}  # name -> sum over samples of each batch, on the device
        self._counts: dict[
            str, int
        ] = {}  # name -> number of samples; batches may have different losses

    def process(self, inputs: Any, outputs: Any) -> None:
        """Add one batch; raises as `parse_losses`."""
        number = num_samples(inputs)
        for name, loss in self._losses(inputs).items():
            wide = (
                loss.float() if loss.device.type == "mps" else loss.double()
            )  # MPS has no float64
            self._sums.setdefault(name, []).append(wide * number)
            self._counts[name] = self._counts.get(name, 0) + number

    def keep_up(self, inputs: Any) -> None:
        """Run the model as often as ``process`` does; see `trainkit.projects.sharding.fsdp`."""
        self._losses(inputs)

    def evaluate(self) -> dict[str, Any]:
        """``{task: {"total_loss": mean, <name>: mean, ...}}`` over all ranks, with the names of a dict; on rank 0."""
        mine = {
            name: (torch.stack(sums).tolist(), self._counts[name])
            for name, sums in self._sums.items()
        }
        by_rank, means = comm.all_gather(mine), {}
        for name in dict.fromkeys(name for theirs in by_rank for name in theirs):
            lists, counts = zip(
                *(theirs[name] for theirs in by_rank if name in theirs), strict=True
            )
            sums = [value for values in lists for value in values]
            # fsum rounds once, so neither the order nor the division of batches over processes changes the result
            means[name] = (math.fsum(sums) if all(map(math.isfinite, sums)) else sum(sums)) / sum(
                counts
            )
        return {self._task: means} if comm.is_main_process() else {}

    def _losses(self, inputs: Any) -> dict[str, Tensor]:
        """``total_loss``, then the single losses; detached. Gradients are on: what requires grad is a loss."""
        with inference_context(self._model), preserve_buffers(self._model), torch.enable_grad():
            if callable(losses_of := getattr(self._model, "losses", None)):
                returned = losses_of(inputs)
            else:
                self._model.train()
                for module in self._model.modules():
                    if isinstance(module, self._frozen_types):
                        module.eval()
                returned = self._model(inputs)
        losses = parse_losses(returned)
        return {"total_loss": losses.total.detach()} | losses.detach().values
