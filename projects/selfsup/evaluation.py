"""Metrics of frozen features: nearest neighbours, a linear probe with few labels, agreement of clusters."""

import math
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
        batches = self._gather()
        if not comm.is_main_process():
            return {}
        features = torch.cat([features for features, _, _ in batches])
        labels = torch.cat([labels for _, labels, _ in batches])
        parts = torch.cat([parts for _, _, parts in batches])
        check_finite_rows("the features that the model returns", features)
        features = features.double()

        def part_of(is_chosen: Tensor) -> _Part:
            return _Part(features[is_chosen], labels[is_chosen])

        train = part_of(parts != EVALUATED)
        labelled = part_of(parts == LABELLED)
        evaluated = part_of(parts == EVALUATED)
        if len(labelled.labels) == 0 or len(evaluated.labels) == 0:
            raise ValueError(
                "frozen features need labelled scans and scans to evaluate, got "
                f"{len(labelled.labels)} and "
                f"{len(evaluated.labels)}; raise TEST.MAX_BATCHES, or set it to 0 for all"
            )
        queries = evaluated.features
        by_probe = linear_probe(train.features, labelled.features, labelled.labels, queries)
        by_neighbours = nearest_neighbours(train.features, train.labels, queries)
        rates = {
            "probe": _share_right(by_probe, evaluated.labels),
            "knn": _share_right(by_neighbours, evaluated.labels),
            "nmi": _cluster_agreement(evaluated.features, evaluated.labels),
        }
        return {"frozen": {name: 100.0 * rate for name, rate in rates.items()}}

    def _gather(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The batches of all ranks, on the CPU; none on ranks other than 0."""
        mine = []
        for features, labels, parts in self._batches:
            mine.append((features.cpu(), labels.cpu(), parts.cpu()))
        batches = []
        for of_rank in comm.gather(mine):
            batches += of_rank
        return batches


def nearest_neighbours(features: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """The label of each of ``queries``: a vote of the 20 nearest samples by cosine, weighted by ``exp(cosine / 0.07)``.

    Args:
        features, labels: ``[N, C]`` and ``[N]``.
        queries: ``[M, C]``.

    Memory: at most 0.5 GB, since the similarities are computed for a part of the queries at a time.
    """
    directions = F.normalize(features)
    num_classes = int(labels.max()) + 1
    num_neighbours = min(_NUM_NEIGHBOURS, len(features))
    found = labels.new_empty(len(queries))
    for chunk in row_chunks(len(queries), len(features)):
        similarities = F.normalize(queries[chunk]) @ directions.T
        nearest = similarities.topk(num_neighbours, dim=1)
        weights = (nearest.values / _TEMPERATURE).exp()
        votes = queries.new_zeros(len(similarities), num_classes)
        votes.scatter_add_(1, labels[nearest.indices], weights)
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
    inputs = (features - mean) / scale
    queries = (queries - mean) / scale
    num_classes = int(labels.max()) + 1
    weight = inputs.new_zeros(num_classes, inputs.shape[1]).requires_grad_()
    bias = inputs.new_zeros(num_classes).requires_grad_()
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = inputs @ weight.T + bias
        penalty = _L2 / 2 * weight.square().sum()
        loss = F.cross_entropy(logits, labels) + penalty
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
    height = int(a.max()) + 1
    counts = torch.bincount(a * width + b, minlength=height * width)
    joint = counts.reshape(height, width).to(torch.float64) / len(a)
    entropy_a = _entropy(joint.sum(1))
    entropy_b = _entropy(joint.sum(0))
    mean = (entropy_a + entropy_b) / 2
    if mean == 0:
        return 1.0
    information = entropy_a + entropy_b - _entropy(joint)
    return float(information / mean)


def _entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities).sum()


def _cluster_agreement(features: Tensor, labels: Tensor) -> float:
    generator = torch.Generator().manual_seed(0)
    points = F.normalize(features)
    num_clusters = len(labels.unique())
    best = labels
    smallest = math.inf
    for _ in range(_NUM_TRIALS):
        clusters, centroids = kmeans(points, num_clusters, generator)
        squares = float((points - centroids[clusters]).square().sum())
        if squares < smallest:
            smallest = squares
            best = clusters
    return normalized_mutual_info(best, labels)


def _share_right(predicted: Tensor, labels: Tensor) -> float:
    return (predicted == labels).double().mean().item()
