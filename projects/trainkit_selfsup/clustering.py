"""k-means."""

import torch
from torch import Tensor
from torch.nn import functional as F


def kmeans(
    features: Tensor, num_clusters: int, generator: torch.Generator, *, max_iters: int = 50, num_trials: int = 1
) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from the seeds of k-means++ (Arthur & Vassilvitskii, 2007); no cluster is empty.

    Args:
        features: ``[N, D]``, floating point.
        generator: a CPU generator; its numbers determine the result.
        max_iters: a trial ends after this many iterations, even if labels still change.
        num_trials: each trial has its own seeds; the trial with the smallest sum of squared distances is returned.

    Returns:
        Labels, int64 ``[N]``, and centroids ``[num_clusters, D]``, the means of their members.

    Raises:
        ValueError: there are fewer samples than clusters.
    """
    if not 1 <= num_clusters <= len(features):
        raise ValueError(f"num_clusters must be 1 to the {len(features)} samples, got {num_clusters}")
    trials = [_one_trial(features, num_clusters, generator, max_iters) for _ in range(num_trials)]
    _, labels, centroids = min(trials, key=lambda trial: trial[0])
    return labels, centroids


def means(features: Tensor, labels: Tensor, num_clusters: int) -> Tensor:
    """The mean of each cluster's members, ``[num_clusters, D]``; zero for an empty cluster."""
    members = F.one_hot(labels, num_clusters).to(features.dtype)  # a product adds in a fixed order, also on a GPU
    return members.T @ features / members.sum(0).clamp(min=1)[:, None]


def _one_trial(
    features: Tensor, num_clusters: int, generator: torch.Generator, max_iters: int
) -> tuple[float, Tensor, Tensor]:
    """The sum of squared distances, labels, centroids."""
    centroids = _seeds(features, num_clusters, generator)
    labels = torch.full([len(features)], -1, device=features.device)
    for _ in range(max_iters):
        distances, nearest = torch.cdist(features, centroids).min(1)
        nearest = _without_empty(nearest, distances, num_clusters)
        if torch.equal(nearest, labels):
            break
        labels, centroids = nearest, means(features, nearest, num_clusters)
    return float((features - centroids[labels]).square().sum()), labels, centroids


def _seeds(features: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """Samples drawn one by one; the probability is larger for a larger squared distance to the samples drawn before."""
    weights = torch.ones(len(features), device=features.device)
    squares = torch.full_like(weights, torch.inf)
    seeds: list[Tensor] = []
    for _ in range(num_clusters):
        seeds.append(features[torch.multinomial(weights.cpu(), 1, generator=generator)])
        squares = torch.minimum(squares, (features - seeds[-1]).square().sum(1))
        # if all samples are equal to seeds, take any
        weights = squares if squares.any() else torch.ones_like(squares)
    return torch.cat(seeds)


def _without_empty(labels: Tensor, distances: Tensor, num_clusters: int) -> Tensor:
    """Give each empty cluster the sample that is farthest from its centroid, out of clusters with several samples."""
    sizes = torch.bincount(labels, minlength=num_clusters)
    for empty in (sizes == 0).nonzero().flatten().tolist():
        taken = torch.where(sizes[labels] > 1, distances, -1).argmax()
        sizes[labels[taken]] -= 1
        sizes[empty] += 1
        labels[taken], distances[taken] = empty, 0
    return labels
