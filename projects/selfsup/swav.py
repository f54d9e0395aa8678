"""SwAV (arXiv:2006.09882), with two views and no small crops."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from projects.selfsup.backbone import SelfSupModel, mlp, pool
from projects.selfsup.queues import new_queue, push
from trainkit.config import CfgNode, configurable
from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY, check_period
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils import comm
from trainkit.utils.model import unwrap_model

_EPSILON = 0.05


@MODEL_REGISTRY.register()
class SwAV(SelfSupModel):
    """From each view the prototypes are told to which the other view is assigned; see `SwAVHook`.

    Prototypes have unit length wherever they are used, and not, as in the paper, from time to time.

    Args:
        dim: of an embedding.
        queue_length: former embeddings of each view and rank that are assigned together with those of the batch.

    Attributes:
        uses_queue: whether they are; the queue is filled all the time.
    """

    queue: Tensor  # [2, queue_length, dim]

    @configurable
    def __init__(
        self, width: int, dim: int, num_prototypes: int, queue_length: int, *, temperature: float = 0.1
    ) -> None:
        super().__init__(width)
        self.projector = mlp(self.backbone.out_channels, self.backbone.out_channels, dim)
        self.prototypes = nn.Linear(dim, num_prototypes, bias=False)
        self.register_buffer("queue", torch.stack([new_queue(queue_length, dim) for _ in range(2)]))
        self.uses_queue = False
        self._temperature = temperature

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        options = cfg.MODEL.SWAV
        return {
            **super().from_config(cfg),
            "dim": options.DIM,
            "num_prototypes": options.NUM_PROTOTYPES,
            "queue_length": options.QUEUE_LENGTH,
        }

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        prototypes = F.normalize(self.prototypes.weight)
        scores, assigned = [], []
        for view, queue in zip((batch["view1"], batch["view2"]), self.queue, strict=True):
            embeddings = F.normalize(self.projector(pool(self.backbone(view))))
            scores.append(embeddings @ prototypes.T)
            former = queue @ prototypes.detach().T if self.uses_queue else scores[-1][:0]
            assigned.append(sinkhorn(torch.cat([scores[-1].detach(), former]))[: len(embeddings)])
            push(queue, embeddings)
        losses = [F.cross_entropy(scores[i] / self._temperature, assigned[1 - i]) for i in range(2)]
        return {"loss_swap": (losses[0] + losses[1]) / 2}


@torch.no_grad()
def sinkhorn(scores: Tensor, num_iters: int = 3) -> Tensor:
    """Soft assignments of samples to prototypes of which all get about the same share; over all ranks together.

    The Sinkhorn-Knopp algorithm of section 3.1.

    Args:
        scores: ``[N, K]`` cosines; every rank passes its own samples.

    Returns:
        ``[N, K]``, each row with sum 1.
    """
    shares = (scores.float() / _EPSILON).exp()
    for _ in range(num_iters):
        totals = shares.sum(dim=0)
        if comm.get_world_size() > 1:
            dist.all_reduce(totals)
        shares = shares / totals
        shares = shares / shares.sum(dim=1, keepdim=True)
    return shares


@HOOK_REGISTRY.register()
class SwAVHook(HookBase):
    """Freezes the prototypes at first, and lets the queue take part later.

    A frozen prototype has no gradient at the update, so neither weight decay nor momentum moves it. What the hook does
    is a function of the iteration; the queue is a buffer of the model.

    Args:
        queue_start: the first iteration in which a `SwAV` uses its queue.
        prototypes_start: the first iteration in which its prototypes are updated.

    Raises:
        ValueError: one of them is no whole number of iterations, or negative.
    """

    def __init__(self, queue_start: int, prototypes_start: int) -> None:
        self._queue_start = check_period("queue_start", queue_start)
        self._prototypes_start = check_period("prototypes_start", prototypes_start)

    def before_step(self) -> None:
        self._model().uses_queue = self.trainer.iter >= self._queue_start

    def after_backward(self) -> None:
        if self.trainer.iter < self._prototypes_start:
            self._model().prototypes.weight.grad = None

    def _model(self) -> SwAV:
        return cast(SwAV, unwrap_model(self.trainer.model))
