"""SimSiam (arXiv:2011.10566)."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from projects.selfsup.backbone import SelfSupModel, mlp
from trainkit.config import CfgNode, configurable
from trainkit.modeling import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class SimSiam(SelfSupModel):
    """From each view, a predictor predicts the projection of the other view; no gradient flows through the target.

    The predictor needs a constant learning rate (section 4.2): in the config its group has ``FIXED_LR: True``.

    Args:
        dim: the length of a projection.
        hidden_dim: the size of the bottleneck in the predictor.
    """

    @configurable
    def __init__(self, width: int, dim: int, hidden_dim: int) -> None:
        super().__init__(width)
        self.projector = nn.Sequential(
            mlp(self.backbone.out_channels, dim, dim), nn.BatchNorm1d(dim, affine=False)
        )
        self.predictor = mlp(dim, hidden_dim, dim)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        return {
            **super().from_config(cfg),
            "dim": cfg.MODEL.SIMSIAM.DIM,
            "hidden_dim": cfg.MODEL.SIMSIAM.HIDDEN_DIM,
        }

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """``loss_sim`` is at least -1; ``output_std`` falls from 1 to 0 if all outputs become the same."""
        target1, prediction1 = self._project(batch["view1"])
        target2, prediction2 = self._project(batch["view2"])
        distance1 = negative_cosine(prediction1, target2)
        distance2 = negative_cosine(prediction2, target1)
        loss = (distance1 + distance2) / 2
        num_samples, dim = target1.shape
        correction = min(1, num_samples - 1)  # one sample has the deviation 0, not NaN
        deviations = F.normalize(target1).std(dim=0, correction=correction)
        spread = deviations.mean() * dim**0.5
        return {"loss_sim": loss, "output_std": spread}

    def _project(self, view: Tensor) -> tuple[Tensor, Tensor]:
        """The projection, which is the other view's target, and what is predicted from it."""
        projection = self.projector(self.features(view))
        return projection.detach(), self.predictor(projection)


def negative_cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """The mean over pairs of rows of two ``[N, D]`` (equation 1); the target gets no gradient."""
    return -F.cosine_similarity(prediction, target.detach()).mean()
