"""DenseCL (arXiv:2011.09157)."""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from projects.selfsup.backbone import SelfSupModel, mlp, pool
from projects.selfsup.queues import new_queue, push
from trainkit.config import CfgNode, configurable
from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY, check_period
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils.model import unwrap_model


class Heads(nn.Module):
    """Embeddings of a map of features ``[N, C, H, W]``: of the whole image, and of each of its P places.

    Returns:
        ``[N, dim]``, ``[N, dim, P]``, and the features as ``[N, C, P]``; all of unit length along dimension 1.
    """

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.single = mlp(channels, channels, dim)
        self.dense = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU(inplace=True), nn.Conv2d(channels, dim, 1))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        single, dense = self.single(pool(features)), self.dense(features).flatten(2)
        return F.normalize(single), F.normalize(dense), F.normalize(features.flatten(2))


@MODEL_REGISTRY.register()
class DenseCL(SelfSupModel):
    """Contrast of images, and of places that match; see `DenseCLHook`.

    The first view is to be closer to the second one, and each place of it to the place there that is most alike, than
    to those of former images. The second view goes through the key encoder, a slowly moving average of the trained one.
    Under several ranks each has queues of its own.

    Args:
        dim: of an embedding.
        queue_length: former images that a view is told from.
        loss_lambda: the weight of the dense loss; that of the other one is ``1 - loss_lambda``.

    Attributes:
        is_dense: False makes the former 0, and the latter 1.
    """

    queue: Tensor  # [queue_length, dim]
    dense_queue: Tensor  # [queue_length, dim]

    @configurable
    def __init__(
        self, width: int, dim: int, queue_length: int, *, loss_lambda: float = 0.5, temperature: float = 0.2
    ) -> None:
        super().__init__(width)
        self.heads = Heads(self.backbone.out_channels, dim)
        self.key_encoder = copy.deepcopy(nn.Sequential(self.backbone, self.heads)).requires_grad_(False)
        self.register_buffer("queue", new_queue(queue_length, dim))
        self.register_buffer("dense_queue", new_queue(queue_length, dim))
        self.is_dense = True
        self._loss_lambda = loss_lambda
        self._temperature = temperature

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        options = cfg.MODEL.DENSECL
        return {
            **super().from_config(cfg),
            "dim": options.DIM,
            "queue_length": options.QUEUE_LENGTH,
            "loss_lambda": options.LOSS_LAMBDA,
        }

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        single, dense, features = self.heads(self.backbone(batch["view1"]))
        with torch.no_grad():
            key_single, key_dense, key_features = self.key_encoder(batch["view2"])
            matched = match(features, key_features)
            positives = key_dense.gather(2, matched[:, None].expand_as(key_dense))
        loss_single = contrast(single, key_single, self.queue, self._temperature)
        loss_dense = contrast(_as_rows(dense), _as_rows(positives), self.dense_queue, self._temperature)
        push(self.queue, key_single)
        push(self.dense_queue, F.normalize(key_dense.mean(dim=2)))
        weight = self._loss_lambda if self.is_dense else 0.0
        return {"loss_single": (1 - weight) * loss_single, "loss_dense": weight * loss_dense}

    @torch.no_grad()
    def update_key_encoder(self, momentum: float) -> None:
        """``key = momentum * key + (1 - momentum) * trained`` for each parameter."""
        parameters = [*self.backbone.parameters(), *self.heads.parameters()]
        for key, trained in zip(self.key_encoder.parameters(), parameters, strict=True):
            key.lerp_(trained, 1 - momentum)


def match(features: Tensor, key_features: Tensor) -> Tensor:
    """For each place the one of the other view whose features are most alike, int64 ``[N, P]``.

    Args:
        features, key_features: ``[N, C, P]``, of unit length along C.
    """
    return torch.einsum("ncp,ncq->npq", features, key_features).argmax(dim=2)


def contrast(queries: Tensor, keys: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """InfoNCE: each of ``queries`` ``[N, D]`` is to be told to belong to its key ``[N, D]``, and not to the queue."""
    positive = (queries * keys).sum(dim=1, keepdim=True)
    # a copy: the queue moves on before the backward pass
    logits = torch.cat([positive, queries @ queue.clone().T], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


def _as_rows(dense: Tensor) -> Tensor:
    """``[N * P, D]`` of ``[N, D, P]``."""
    return dense.transpose(1, 2).flatten(0, 1)


@HOOK_REGISTRY.register()
class DenseCLHook(HookBase):
    """Switches the dense loss of a `DenseCL` on, and moves its key encoder on behind every update.

    Both are functions of the iteration and the weights, so the hook has no state.

    Args:
        start: the first iteration with the model's ``loss_lambda``, which is 0 before it: as long as the backbone
            has learned nothing, the places of two views do not match.
        momentum: of the key encoder.

    Raises:
        ValueError: ``start`` is no whole number of iterations or negative, or ``momentum`` outside [0, 1].
    """

    def __init__(self, start: int, momentum: float) -> None:
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be from 0 to 1, got {momentum}")
        self._start = check_period("start", start)
        self._momentum = momentum

    def before_step(self) -> None:
        self._model().is_dense = self.trainer.iter >= self._start

    def after_step(self) -> None:
        self._model().update_key_encoder(self._momentum)

    def _model(self) -> DenseCL:
        return cast(DenseCL, unwrap_model(self.trainer.model))
