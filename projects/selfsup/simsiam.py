"""SimSiam (arXiv:2011.10566)."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from projects.selfsup.backbone import SelfSupModel, mlp, pool
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
        targets, predictions = [], []
        for view in (batch["view1"], batch["view2"]):
            projection = self.projector(pool(self.backbone(view)))
            targets.append(projection.detach())
            predictions.append(self.predictor(projection))
        loss = (
            negative_cosine(predictions[0], targets[1])
            + negative_cosine(predictions[1], targets[0])
        ) / 2
        correction = min(1, len(targets[0]) - 1)  # one sample has the deviation 0, not NaN
        deviations = F.normalize(targets[0]).std(dim=0, correction=correction)
        spread = deviations.mean() * targets[0].shape[1] ** 0.5
        return {"loss_sim": loss, "output_std": spread}


def negative_cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """The mean over pairs of rows of two ``[N, D]`` (equation 1); the target gets no gradient."""
    return -F.cosine_similarity(prediction, target.detach()).mean()
