"""Metrics of frozen features: nearest neighbours, a linear probe with few labels, agreement of clusters."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from projects.selfsup.data import EVALUATED, LABELLED
from trainkit.config import CfgNode, configurable
from trainkit.evaluation import EVALUATOR_REGISTRY, DatasetEvaluator
from trainkit.utils import comm
from trainkit_selfsup.clustering import check_finite_rows, kmeans, row_chunks

_NUM_NEIGHBOURS = 20
_TEMPERATURE = 0.07  # for the votes of the neighbours, as in arXiv:1805.01978
_L2 = 0.01
_NUM_TRIALS = 10  # of k-means; the one with the smallest sum of squared distances counts


class _Part(NamedTuple):
    features: Tensor  # [N, C], float64 on the CPU
    labels: Tensor  # [N], int64


@EVALUATOR_REGISTRY.register()
class FrozenFeatureEvaluator(DatasetEvaluator):
    """Evaluates the features that a model returns, ``[N, C]``, without training it; all in percent.

    A batch has ``label`` and ``part``, see `projects.selfsup.data`. ``knn`` is the accuracy of a vote of the 20
    training scans that are nearest by cosine; it uses the labels of all training scans. ``probe`` is the accuracy of a
    linear classifier on standardized features that is fitted only to the labelled training scans. ``nmi`` is the
    normalized mutual information between the labels and as many clusters of k-means. The result depends only on
    features and labels.
    """

    @configurable
    def __init__(self) -> None:
        self.reset()

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        return {}

    def reset(self) -> None:
        self._batches: list[tuple[Tensor, Tensor, Tensor]] = []

    def process(self, inputs: dict[str, Tensor], outputs: Tensor) -> None:
        self._batches.append((outputs, inputs["label"], inputs["part"]))

    def evaluate(self) -> dict[str, Any]:
        """
        Returns:
            On rank 0 ``{"frozen": {"probe": ..., "knn": ..., "nmi": ...}}``, on the other ranks ``{}``.

        Raises:
            ValueError: there was no labelled scan, or no scan to evaluate; a feature is NaN or inf.
        """
        mine = [[column.cpu() for column in batch] for batch in self._batches]
        batches = [batch for rank in comm.gather(mine) for batch in rank]
        if not comm.is_main_process():
            return {}
        features, labels, parts = map(torch.cat, zip(*batches, strict=True))
        check_finite_rows("the features that the model returns", features)
        features = features.double()
        train, labelled, evaluated = (
            _Part(features[chosen], labels[chosen])
            for chosen in (parts != EVALUATED, parts == LABELLED, parts == EVALUATED)
        )
        if not (len(labelled.labels) and len(evaluated.labels)):
            raise ValueError(
                f"frozen features need labelled scans and scans to evaluate, got {len(labelled.labels)} and "
                f"{len(evaluated.labels)}; raise TEST.MAX_BATCHES, or set it to 0 for all"
            )
        rates = {
            "probe": _share_right(
                linear_probe(train.features, *labelled, evaluated.features), evaluated.labels
            ),
            "knn": _share_right(nearest_neighbours(*train, evaluated.features), evaluated.labels),
            "nmi": _cluster_agreement(*evaluated),
        }
        return {"frozen": {name: 100.0 * rate for name, rate in rates.items()}}


def nearest_neighbours(features: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """The label of each of ``queries``: a vote of the 20 nearest samples by cosine, weighted by ``exp(cosine / 0.07)``.

    Args:
        features, labels: ``[N, C]`` and ``[N]``.
        queries: ``[M, C]``.

    Memory: at most 0.5 GB, since the similarities are computed for a part of the queries at a time.
    """
    directions = F.normalize(features)
    found = labels.new_empty(len(queries))
    for chunk in row_chunks(len(queries), len(features)):
        similarities = F.normalize(queries[chunk]) @ directions.T
        nearest = similarities.topk(min(_NUM_NEIGHBOURS, len(features)), dim=1)
        votes = queries.new_zeros(len(similarities), int(labels.max()) + 1)
        votes.scatter_add_(1, labels[nearest.indices], (nearest.values / _TEMPERATURE).exp())
        found[chunk] = votes.argmax(dim=1)
    return found


def linear_probe(unlabelled: Tensor, features: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """The label for each of ``queries`` by logistic regression with an L2 penalty; the optimum is unique.

    Args:
        unlabelled: ``[U, C]``; their mean and deviation standardize all features.
        features, labels: ``[N, C]`` and ``[N]``, the training data.
        queries: ``[M, C]``.
    """
    correction = min(1, len(unlabelled) - 1)  # one sample has the deviation 0, not NaN
    deviation, mean = torch.std_mean(unlabelled, dim=0, correction=correction)
    scale = deviation.clamp(min=1e-6)
    x, queries = (features - mean) / scale, (queries - mean) / scale
    weight, bias = (
        x.new_zeros(int(labels.max()) + 1, x.shape[1]),
        x.new_zeros(int(labels.max()) + 1),
    )
    optimizer = torch.optim.LBFGS(
        [weight.requires_grad_(), bias.requires_grad_()],
        max_iter=200,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight.T + bias, labels) + _L2 / 2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return (queries @ weight.detach().T + bias.detach()).argmax(dim=1)


def normalized_mutual_info(a: Tensor, b: Tensor) -> float:
    """Mutual information of two labelings divided by the mean of their entropies, in [0, 1]; 1 if both are constant.

    Args:
        a, b: int64 ``[N]``, from 0.
    """
    width = int(b.max()) + 1
    counts = torch.bincount(a * width + b, minlength=(int(a.max()) + 1) * width)
    joint = counts.reshape(-1, width).to(torch.float64) / len(a)
    entropy_a, entropy_b, entropy = (
        torch.special.entr(p).sum() for p in (joint.sum(1), joint.sum(0), joint)
    )
    mean = (entropy_a + entropy_b) / 2
    return 1.0 if mean == 0 else float((entropy_a + entropy_b - entropy) / mean)


def _cluster_agreement(features: Tensor, labels: Tensor) -> float:
    generator = torch.Generator().manual_seed(0)
    points = F.normalize(features)
    trials = [kmeans(points, len(labels.unique()), generator) for _ in range(_NUM_TRIALS)]
    clusters, _ = min(trials, key=lambda trial: float((points - trial[1][trial[0]]).square().sum()))
    return normalized_mutual_info(clusters, labels)


def _share_right(predicted: Tensor, labels: Tensor) -> float:
    return (predicted == labels).double().mean().item()
