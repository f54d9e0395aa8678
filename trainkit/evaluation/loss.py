"""The losses of a model on data that it is not trained on."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from trainkit.config.config import CfgNode
from trainkit.config.configurable import configurable
from trainkit.evaluation.evaluator import DatasetEvaluator, inference_context
from trainkit.utils import comm
from trainkit.utils.batches import num_samples
from trainkit.utils.losses import parse_losses
from trainkit.utils.model import unwrap_model

# What acts randomly or keeps running statistics while training: dropout, also that inside recurrent and attention
# layers, batch and instance norm.
_FROZEN_TYPES = (_NormBase, _DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.RReLU)


class LossEvaluator(DatasetEvaluator):
    """Means over all samples of the losses that ``model`` returns, and of their sum.

    Where ``model`` has a method ``losses(batch)``, that is called, in eval mode. Otherwise ``model(batch)`` is called
    in train mode, with everything in eval mode that keeps running statistics or drops out (batch and instance norm,
    dropout, recurrent and attention layers, ``freeze``). Modes and buffers are put back after every batch. As in
    training, ``total_loss`` is the sum of the entries that require grad. Each batch counts with its number of samples.

    Args:
        model: a data-parallel wrapper is looked through; default is the one that is evaluated.
        freeze: further module classes to keep in eval mode, such as a stochastic depth of your own.
        num_samples: number of samples of a batch.
        task: the key of the results.
    """

    @configurable
    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        freeze: Sequence[type[nn.Module]] = (),
        num_samples: Callable[[Any], int] = num_samples,
        task: str = "loss",
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        self._given_model = None if model is None else unwrap_model(model)
        self._model = self._given_model
        self._frozen_types = (*_FROZEN_TYPES, *freeze)
        self._num_samples, self._task = num_samples, task
        self.reset()

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        return {}

    def bind(self, model: Any) -> None:
        self._model = self._given_model or model

    def reset(self) -> None:
        self._sums: dict[str, Tensor] = {}  # name -> sum over samples, on the device
        self._counts: dict[str, int] = {}  # name -> samples, for losses that not every batch has

    def process(self, inputs: Any, outputs: Any) -> None:
        """Add one batch.

        Raises:
            TypeError: the model returns no tensor or dict of tensors.
            ValueError: a loss is no scalar, or none requires grad.
        """
        num_samples = self._num_samples(inputs)
        for name, loss in self._losses(inputs).items():
            # MPS has no float64.
            loss = loss.to(torch.float32 if loss.device.type == "mps" else torch.float64) * num_samples
            self._sums[name] = self._sums[name] + loss if name in self._sums else loss
            self._counts[name] = self._counts.get(name, 0) + num_samples

    def keep_up(self, inputs: Any) -> None:
        self._losses(inputs)

    def evaluate(self) -> dict[str, Any]:
        """Combine the ranks.

        Returns:
            On rank 0 ``{task: {"total_loss": mean, <name>: mean, ...}}``, the names being those of a dict of
            losses; on the other ranks ``{}``.

        Raises:
            ValueError: no sample was processed.
        """
        sums = torch.stack(list(self._sums.values())).tolist() if self._sums else []  # one transfer
        totals: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for theirs, their_counts in comm.all_gather((dict(zip(self._sums, sums, strict=True)), self._counts)):
            totals.update(theirs)
            counts.update(their_counts)
        if not counts:
            raise ValueError("no sample was processed on any rank, so there is no loss; call process() first")
        means = {name: total / counts[name] for name, total in totals.items()}
        return {self._task: means} if comm.is_main_process() else {}

    def _losses(self, inputs: Any) -> dict[str, Tensor]:
        """``total_loss`` first, then the single ones; detached, on the device."""
        if self._model is None:
            raise RuntimeError("no model is known: give LossEvaluator a model, or let inference_on_dataset call bind()")
        losses_of = getattr(self._model, "losses", None)
        # With gradients switched on, because which entries require one says which are losses.
        with inference_context(self._model), _preserve_buffers(self._model), torch.enable_grad():
            if callable(losses_of):
                returned = losses_of(inputs)
            else:
                self._model.train()
                for module in self._model.modules():
                    if isinstance(module, self._frozen_types):
                        module.eval()
                returned = self._model(inputs)
        losses = parse_losses(returned)
        return {"total_loss": losses.total.detach()} | losses.detach().values


@contextmanager
def _preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Put the buffers back on leaving, whether they were written to or replaced."""
    saved = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in saved:
                buffer.copy_(value)
                setattr(module, name, buffer)
