"""SwAV (arXiv:2006.09882), with two views and no small crops."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from projects.selfsup.backbone import SelfSupModel, mlp
from projects.selfsup.queues import push
from trainkit.config import CfgNode, configurable
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils import comm

_EPSILON = 0.05


class SwAVLoss(nn.Module):
    """From the embedding of each view, predict the prototypes to which the embedding of the other view is assigned.

    Prototypes are normalized to unit length at every use; the paper normalizes them from time to time.

    Attributes:
        queue: earlier embeddings ``[2, rows, dim]`` of this rank, newest first; a `SwAVHook` creates it, else None.
        use_queue: whether the queue is assigned together with the embeddings of the batch; True as soon as it is full.
    """

    queue: Tensor | None

    def __init__(self, dim: int, num_prototypes: int, temperature: float) -> None:
        super().__init__()
        self.prototypes = nn.Linear(dim, num_prototypes, bias=False)
        self.queue = None
        self.use_queue = False
        self._temperature = temperature

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        prototypes = F.normalize(self.prototypes.weight)
        scores = [rows @ prototypes.T for rows in embeddings]
        self._look_at_queue()
        assigned = []
        for view, rows in enumerate(embeddings):
            former = scores[view][:0]  # none
            if self.queue is not None and self.use_queue:
                former = self.queue[view] @ prototypes.detach().T
            of_all = sinkhorn(torch.cat([scores[view].detach(), former]))
            assigned.append(of_all[: len(rows)])
            if self.queue is not None:
                push(self.queue[view], rows)
        loss1 = F.cross_entropy(scores[0] / self._temperature, assigned[1])
        loss2 = F.cross_entropy(scores[1] / self._temperature, assigned[0])
        return (loss1 + loss2) / 2

    def _look_at_queue(self) -> None:
        """Use the queue as soon as its oldest rows are there."""
        if not self.use_queue and self.queue is not None:
            self.use_queue = bool(self.queue[:, -1].any())


class SwAVHead(nn.Module):
    """Holds the loss where MMSelfSup expects it: ``head.loss``."""

    def __init__(self, loss: SwAVLoss) -> None:
        super().__init__()
        self.loss = loss


@MODEL_REGISTRY.register()
class SwAV(SelfSupModel):
    """See `SwAVLoss`, and `trainkit_selfsup.SwAVHook`.

    Args:
        dim: the length of an embedding.
    """

    @configurable
    def __init__(
        self, width: int, dim: int, num_prototypes: int, *, temperature: float = 0.1
    ) -> None:
        super().__init__(width)
        self.projector = mlp(self.backbone.out_channels, self.backbone.out_channels, dim)
        self.head = SwAVHead(SwAVLoss(dim, num_prototypes, temperature))

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        options = cfg.MODEL.SWAV
        return {
            **super().from_config(cfg),
            "dim": options.DIM,
            "num_prototypes": options.NUM_PROTOTYPES,
        }

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        embeddings = []
        for view in ("view1", "view2"):
            projection = self.projector(self.features(batch[view]))
            embeddings.append(F.normalize(projection))
        return {"loss_swap": self.head.loss(embeddings)}


@torch.no_grad()
def sinkhorn(scores: Tensor, num_iters: int = 3) -> Tensor:
    """Soft assignments of samples to prototypes; each prototype gets about the same share, over all ranks together.

    The Sinkhorn-Knopp algorithm of section 3.1.

    Args:
        scores: ``[N, K]`` cosines; every rank passes its own samples.

    Returns:
        ``[N, K]``, each row with sum 1.
    """
    shares = (scores.float() / _EPSILON).exp()  # of cosines: 2e-9 to 5e8, so no sum is 0
    for _ in range(num_iters):
        totals = shares.sum(dim=0)
        if comm.get_world_size() > 1:
            dist.all_reduce(totals)
        shares = shares / totals
        shares = shares / shares.sum(dim=1, keepdim=True)
    return shares
