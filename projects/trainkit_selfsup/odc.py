"""The hook of online deep clustering (arXiv:2006.10645)."""

from typing import Any

import torch
from torch import Tensor

from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY, check_period, is_due
from trainkit_selfsup.features import check_power, loss_weights, put_sizes, use_loss_weight
from trainkit_selfsup.protocol import model_of


@HOOK_REGISTRY.register()
class ODCHook(HookBase):
    """Update the centroids, deal with small clusters, and weight the loss, at their periods.

    The model has ``memory_bank`` with ``label_bank``, int64 ``[N]`` in which the model writes the labels of a batch,
    ``num_classes``, ``update_centroids_memory()`` and ``deal_with_small_clusters()``; an `ODCMemory` has them. With
    ``reweight`` it has ``loss_weight``, a buffer ``[num_classes]``; if ``head.loss`` has ``class_weight``, it is set
    too. A `DeepClusterHook` with ``init_memory`` fills the memory at the start of a run. The hook depends only on the
    iteration and the memory, so it has no state.

    Args:
        centroids_update_interval: iterations from one update of all centroids to the next.
        deal_with_small_clusters_interval: iterations from one search for small clusters to the next.
        evaluate_interval: iterations from one record of cluster sizes in the storage to the next.
        reweight: set ``loss_weight`` after each iteration. (MMSelfSup's hook does so even if this is False.)
        reweight_pow: a cluster of n samples has the weight ``(n + 1e-10) ** -reweight_pow``, divided by their sum.
            (MMSelfSup's hook always uses 0.5.)

    Raises:
        ValueError: an interval is less than 1, or the power is negative.
        ConfigError: before training, if the model lacks an attribute, or is sharded.
    """

    def __init__(
        self,
        centroids_update_interval: int,
        deal_with_small_clusters_interval: int,
        evaluate_interval: int,
        reweight: bool = True,
        reweight_pow: float = 0.5,
    ) -> None:
        self._centroids_period = check_period("centroids_update_interval", centroids_update_interval, minimum=1)
        small = check_period("deal_with_small_clusters_interval", deal_with_small_clusters_interval, minimum=1)
        self._small_clusters_period = small
        self._evaluate_period = check_period("evaluate_interval", evaluate_interval, minimum=1)
        self._reweight, self._power = reweight, check_power(reweight_pow)

    def before_train(self) -> None:
        names = ("label_bank", "num_classes", "update_centroids_memory", "deal_with_small_clusters")
        needed = [*(f"memory_bank.{name}" for name in names), *["loss_weight"] * self._reweight]
        self._model: Any = model_of(self, *needed, whole=True)
        if self._reweight:
            use_loss_weight(self._model)

    def after_step(self) -> None:
        memory = self._model.memory_bank
        if is_due(self.trainer, self._centroids_period):
            memory.update_centroids_memory()
        if is_due(self.trainer, self._small_clusters_period):
            memory.deal_with_small_clusters()
        if self._reweight:
            self._model.loss_weight.copy_(loss_weights(self._sizes(), self._power))
        if is_due(self.trainer, self._evaluate_period):
            put_sizes(self.trainer.storage, self._sizes())

    def _sizes(self) -> Tensor:
        return torch.bincount(self._model.memory_bank.label_bank, minlength=self._model.memory_bank.num_classes)
