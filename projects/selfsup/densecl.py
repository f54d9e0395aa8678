"""DenseCL (arXiv:2011.09157)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from projects.selfsup.backbone import SelfSupModel, mlp, pool
from projects.selfsup.queues import new_queue, push
from trainkit.config import CfgNode, configurable
from trainkit.modeling import MODEL_REGISTRY


class Heads(nn.Module):
    """Embeddings of a map of features ``[N, C, H, W]``: of the whole image, and of each of its P positions.

    Returns:
        ``[N, dim]``, ``[N, dim, P]``, and the features as ``[N, C, P]``; all of unit length along dimension 1.
    """

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.single = mlp(channels, channels, dim)
        self.dense = nn.Sequential(
            nn.Conv2d(channels, channels, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, dim, 1),
        )

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        single = self.single(pool(features))
        dense = self.dense(features).flatten(2)
        positions = features.flatten(2)
        return F.normalize(single), F.normalize(dense), F.normalize(positions)


@MODEL_REGISTRY.register()
class DenseCL(SelfSupModel):
    """Contrast of images, and of matching positions; see `trainkit_selfsup.DenseCLHook`.

    The loss is small if the first view is closer to the second view than to earlier images, and if each position of the
    first view is closer to its most similar position in the second view than to positions of earlier images. The second
    view goes through the key encoder, a slowly moving average of the trained encoder. Each rank has its own queues.

    Args:
        dim: the length of an embedding.
        queue_length: the number of earlier images to contrast with.
        loss_lambda: the weight of the dense loss; the weight of the other loss is ``1 - loss_lambda``.
    """

    queue: Tensor  # [queue_length, dim]
    dense_queue: Tensor  # [queue_length, dim]

    @configurable
    def __init__(
        self,
        width: int,
        dim: int,
        queue_length: int,
        *,
        loss_lambda: float = 0.5,
        temperature: float = 0.2,
    ) -> None:
        super().__init__(width)
        self.heads = Heads(self.backbone.out_channels, dim)
        encoder = nn.Sequential(self.backbone, self.heads)
        self.key_encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("queue", new_queue(queue_length, dim))
        self.register_buffer("dense_queue", new_queue(queue_length, dim))
        self.loss_lambda = loss_lambda
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
        temperature = self._temperature
        loss_single = contrast(single, key_single, self.queue, temperature)
        rows = _as_rows(dense)
        key_rows = _as_rows(positives)
        loss_dense = contrast(rows, key_rows, self.dense_queue, temperature)
        push(self.queue, key_single)
        push(self.dense_queue, F.normalize(key_dense.mean(dim=2)))
        weight = self.loss_lambda
        return {"loss_single": (1 - weight) * loss_single, "loss_dense": weight * loss_dense}

    @torch.no_grad()
    def update_key_encoder(self, momentum: float) -> None:
        """``key = momentum * key + (1 - momentum) * trained`` for each parameter."""
        parameters = [*self.backbone.parameters(), *self.heads.parameters()]
        for key, trained in zip(self.key_encoder.parameters(), parameters, strict=True):
            key.lerp_(trained, 1 - momentum)


def match(features: Tensor, key_features: Tensor) -> Tensor:
    """For each position the most similar position of the other view, int64 ``[N, P]``.

    Args:
        features, key_features: ``[N, C, P]``, of unit length along C.
    """
    return torch.einsum("ncp,ncq->npq", features, key_features).argmax(dim=2)


def contrast(queries: Tensor, keys: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """InfoNCE: finds for each of ``queries`` ``[N, D]`` its key in ``[N, D]`` among the embeddings of the queue."""
    positive = (queries * keys).sum(dim=1, keepdim=True)
    # copy the queue, because it changes before the backward pass
    negative = queries @ queue.clone().T
    logits = torch.cat([positive, negative], dim=1) / temperature
    is_first = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits, is_first)


def _as_rows(dense: Tensor) -> Tensor:
    """``[N, D, P]`` as rows ``[N * P, D]``."""
    return dense.transpose(1, 2).flatten(0, 1)
