"""The features of the whole training set, and what is made of clusters of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.config import CfgNode, ConfigError
from trainkit.data import build_test_loader
from trainkit.evaluation import inference_context
from trainkit.utils import comm
from trainkit.utils.device import move_to_device
from trainkit.utils.events import EventStorage
from trainkit.utils.rng import preserve_rng_state


def train_dataset_name(cfg: CfgNode) -> str:
    """
    Raises:
        ConfigError: there is not exactly one training dataset, whose samples have their ``index``.
    """
    if len(cfg.DATASETS.TRAIN) != 1:
        raise ConfigError(f"DATASETS.TRAIN must name the one dataset to cluster, got {list(cfg.DATASETS.TRAIN)}")
    return cfg.DATASETS.TRAIN[0]


@torch.no_grad()
def extract_features(cfg: CfgNode, model: nn.Module, embed: Callable[[Any], Tensor]) -> Tensor:
    """``embed(batch)`` ``[n, D]`` of the training data in their order, without augmentation: ``[N, D]`` on the CPU.

    ``model`` is in eval mode meanwhile; its mode and the random state are left as they were. Every rank calls it, does
    a part, and gets all.
    """
    with preserve_rng_state(), inference_context(model):
        loader = build_test_loader(cfg, train_dataset_name(cfg))
        device = next(model.parameters()).device
        found = [embed(move_to_device(batch, device)).cpu() for batch in loader]
    return torch.cat([features for rank in comm.all_gather(found) for features in rank])


def whiten(features: Tensor, dim: int) -> Tensor:
    """The ``dim`` principal components of ``[N, D]``, each with variance 1, in rows of length 1; float64 ``[N, dim]``.

    Directions in which nothing varies give zeros.
    """
    centered = (features - features.mean(0)).double()
    variances, directions = torch.linalg.eigh(centered.T @ centered / len(centered))  # in ascending order
    scales = (variances[-dim:] + 1e-5 * variances[-1]).rsqrt()
    return F.normalize(centered @ directions[:, -dim:] * scales)


def loss_weights(sizes: Tensor, power: float) -> Tensor:
    """Of clusters of these sizes ``[K]``: ``1 / size ** power``, with the sum 1."""
    weights = sizes.clamp(min=1) ** -power  # an empty one has no sample to weight
    return weights / weights.sum()


def put_sizes(storage: EventStorage, sizes: Tensor) -> None:
    """Store the smallest and the largest of cluster sizes ``[K]``, and how many clusters are empty."""
    found = {"smallest": sizes.min(), "largest": sizes.max(), "empty": (sizes == 0).sum()}
    storage.put_scalars(**{f"clusters/{name}": int(value) for name, value in found.items()}, smoothing_hint=False)
