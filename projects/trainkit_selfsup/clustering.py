"""k-means, and features and samples for it."""

import torch
from torch import Tensor
from torch.nn import functional as F

# entries of a matrix that is computed at once: 128 MiB in float64
_CHUNK_ENTRIES = 1 << 24


def row_chunks(num_rows: int, num_columns: int) -> list[slice]:
    """Parts of ``range(num_rows)``; a matrix of such a part and ``num_columns`` takes at most 128 MiB in float64.

    A row that is longer than this is a part of its own.
    """
    size = max(1, _CHUNK_ENTRIES // max(1, num_columns))
    chunks = []
    for start in range(0, num_rows, size):
        end = min(start + size, num_rows)
        chunks.append(slice(start, end))
    return chunks


def check_finite_rows(name: str, rows: Tensor) -> None:
    """Raise ValueError if ``rows`` ``[N, D]`` has NaN or inf."""
    bad: list[int] = []
    for chunk in row_chunks(*rows.shape):
        is_bad = ~rows[chunk].isfinite().all(1)
        places = chunk.start + is_bad.nonzero().flatten()
        bad += places.tolist()
    if bad:
        raise ValueError(
            f"{name} must be finite, but {len(bad)} of {len(rows)} rows have NaN or inf, "
            f"the first is row {bad[0]}; look at this sample and at the weights of the model"
        )


def kmeans(
    features: Tensor, num_clusters: int, generator: torch.Generator, *, max_iters: int = 50
) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from the seeds of k-means++ (Arthur & Vassilvitskii, 2007); no cluster is empty.

    ``features`` are ``[N, D]``, floating point; the numbers of the CPU ``generator`` determine the result. The
    algorithm ends after ``max_iters``, even if labels still change. Returns labels, int64 ``[N]``, and centroids
    ``[num_clusters, D]``, the means of their members.

    Memory beside ``features`` and the centroids: about 50 bytes per sample, and at most 0.6 GB, since distances are
    computed for a part of the samples at a time. A million samples and 10,000 clusters take 0.7 GB.

    Raises:
        ValueError: ``num_clusters`` is out of range; a feature is NaN or inf.
    """
    if not 1 <= num_clusters <= len(features):
        raise ValueError(
            f"num_clusters must be 1 to the {len(features)} samples, got {num_clusters}"
        )
    check_finite_rows("features", features)
    centroids = _seeds(features, num_clusters, generator)
    labels = torch.full([len(features)], -1, device=features.device)
    for _ in range(max_iters):
        distances, nearest = nearest_centroids(features, centroids)
        nearest = _without_empty(nearest, distances, num_clusters)
        if torch.equal(nearest, labels):
            break
        labels = nearest
        centroids = means(features, labels, num_clusters)
    return labels, centroids


def nearest_centroids(features: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The distance of each row of ``[N, D]`` to the nearest centroid of ``[K, D]``, and this centroid's number."""
    # torch's rule, by the size of the whole matrix: a small last part must not be computed in another way
    is_large = len(features) > 25 or len(centroids) > 25
    mode = "use_mm_for_euclid_dist" if is_large else "donot_use_mm_for_euclid_dist"
    distances = features.new_empty(len(features))
    nearest = torch.empty(len(features), dtype=torch.int64, device=features.device)
    for chunk in row_chunks(len(features), len(centroids)):
        found = torch.cdist(features[chunk], centroids, compute_mode=mode).min(1)
        distances[chunk] = found.values
        nearest[chunk] = found.indices
    return distances, nearest


def most_similar_centroids(features: Tensor, centroids: Tensor) -> Tensor:
    """For each row of ``[N, D]`` the number of the centroid of ``[K, D]`` with the largest inner product."""
    nearest = torch.empty(len(features), dtype=torch.int64, device=features.device)
    for chunk in row_chunks(len(features), len(centroids)):
        products = features[chunk] @ centroids.T
        nearest[chunk] = products.argmax(1)
    return nearest


def means(features: Tensor, labels: Tensor, num_clusters: int) -> Tensor:
    """The mean of each cluster's members, ``[num_clusters, D]``; zero for an empty cluster."""
    sums = features.new_zeros(num_clusters, features.shape[1])
    for chunk in row_chunks(len(features), num_clusters):
        # a product adds in a fixed order, also on a GPU
        members = F.one_hot(labels[chunk], num_clusters).to(features.dtype)
        sums += members.T @ features[chunk]
    sizes = torch.bincount(labels, minlength=num_clusters).to(features.dtype)
    return sums / sizes.clamp(min=1)[:, None]


def _seeds(features: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """Samples drawn one by one; the probability is larger for a larger squared distance to the samples drawn before."""
    weights = torch.ones(len(features), device=features.device)
    squares = torch.full_like(weights, torch.inf)
    seeds: list[Tensor] = []
    for _ in range(num_clusters):
        drawn = torch.multinomial(weights.cpu(), 1, generator=generator)
        seed = features[drawn]  # [1, D]
        seeds.append(seed)
        to_seed = []
        for chunk in row_chunks(*features.shape):
            difference = features[chunk] - seed
            to_seed.append(difference.square().sum(1))
        squares = torch.minimum(squares, torch.cat(to_seed))
        weights = squares
        if not squares.any():  # all samples are equal to seeds: take any
            weights = torch.ones_like(squares)
    return torch.cat(seeds)


def _without_empty(labels: Tensor, distances: Tensor, num_clusters: int) -> Tensor:
    """Give each empty cluster the sample that is farthest from its centroid, out of clusters with several samples."""
    sizes = torch.bincount(labels, minlength=num_clusters)
    for empty in (sizes == 0).nonzero().flatten().tolist():
        has_company = sizes[labels] > 1
        taken = torch.where(has_company, distances, -1).argmax()
        sizes[labels[taken]] -= 1
        sizes[empty] += 1
        labels[taken] = empty
        distances[taken] = 0
    return labels


def whiten(features: Tensor, dim: int) -> Tensor:
    """The ``dim`` principal components of ``[N, D]``, each with variance 1, in rows of length 1; float64 ``[N, dim]``.

    Directions without variance give zeros: a variance that the rounding of ``features`` alone can cause counts as none.
    Memory beside the result: at most 0.5 GB, and three matrices ``[D, D]`` in float64.

    Raises:
        ValueError: ``dim`` is out of range; a feature is NaN or inf.
    """
    if not 1 <= dim <= features.shape[1]:
        raise ValueError(f"dim must be 1 to the {features.shape[1]} features, got {dim}")
    check_finite_rows("features", features)
    mean, covariance = _mean_and_covariance(features)
    variances, directions = torch.linalg.eigh(covariance)  # in ascending order
    variances = variances[-dim:]
    directions = directions[:, -dim:]
    scales = (variances + 1e-5 * variances[-1]).rsqrt()
    rounding = torch.finfo(features.dtype).eps * _largest(features)
    scales = torch.where(variances > rounding**2, scales, 0)
    white = torch.empty(len(features), dim, dtype=torch.float64, device=features.device)
    for chunk in row_chunks(*features.shape):
        centered = features[chunk].double() - mean
        components = centered @ directions
        white[chunk] = F.normalize(components * scales)
    return white


def _mean_and_covariance(features: Tensor) -> tuple[Tensor, Tensor]:
    """Of the rows of ``[N, D]``: ``[D]`` and ``[D, D]``.

    In float64: the error of a mean in float32 would count as variance.
    """
    number, size = features.shape
    mean = torch.zeros(size, dtype=torch.float64, device=features.device)
    for chunk in row_chunks(number, size):
        mean += features[chunk].double().sum(0) / number
    products = torch.zeros(size, size, dtype=torch.float64, device=features.device)
    for chunk in row_chunks(number, size):
        centered = features[chunk].double() - mean
        products += centered.T @ centered
    return mean, products / number


def _largest(features: Tensor) -> float:
    """The largest absolute value."""
    largest = 0.0
    for chunk in row_chunks(*features.shape):
        of_chunk = features[chunk].abs().max()
        largest = max(largest, float(of_chunk))
    return largest


def uniform_indices(labels: Tensor, generator: torch.Generator) -> Tensor:
    """``N`` indices for labels ``[N]``; each cluster that is not empty has the same number of indices, give or take 1.

    If a cluster has enough samples, each sample is drawn at most once; from a smaller one, with replacement.
    """
    clusters = labels.unique()
    sizes = torch.full([len(clusters)], len(labels) // len(clusters))
    sizes[: len(labels) % len(clusters)] += 1
    drawn = []
    for cluster, size in zip(clusters, sizes.tolist(), strict=True):
        members = (labels == cluster).nonzero().flatten()
        if len(members) >= size:
            places = torch.randperm(len(members), generator=generator)[:size]
        else:
            places = torch.randint(len(members), [size], generator=generator)
        drawn.append(members[places])
    return torch.cat(drawn).sort().values
