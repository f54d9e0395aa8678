"""The features of the whole training set, and functions for their clusters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.config import CfgNode, ConfigError
from trainkit.data import build_test_loader
from trainkit.evaluation import inference_context
from trainkit.utils import comm
from trainkit.utils.device import move_to_device
from trainkit.utils.env import preserve_rng_state
from trainkit.utils.events import EventStorage


def train_dataset_name(cfg: CfgNode) -> str:
    """
    Raises:
        ConfigError: there is not exactly one training dataset.
    """
    if len(cfg.DATASETS.TRAIN) != 1:
        raise ConfigError(f"DATASETS.TRAIN must name the one dataset to cluster, got {list(cfg.DATASETS.TRAIN)}")
    return cfg.DATASETS.TRAIN[0]


def embed(model: Any, batch: Any) -> Tensor:
    """``[n, D]``: the output of ``extract_feat(batch)``, and then of ``neck`` if the model has one.

    If an output is a tuple or list, its last entry is used; of a map, the mean over all positions.
    """
    found = model.extract_feat(batch)
    if getattr(model, "neck", None) is not None:
        found = model.neck(found)
    if isinstance(found, tuple | list):
        found = found[-1]
    return found if found.ndim == 2 else found.flatten(2).mean(2)


@torch.no_grad()
def extract_features(model: nn.Module, embed: Callable[[Any], Tensor], source: CfgNode | Iterable[Any]) -> Tensor:
    """``embed(batch)`` ``[n, D]`` of the training data in their order: ``[N, D]`` on the CPU, equal on all ranks.

    ``model`` runs in eval mode; its mode and the random state are restored. Every rank calls it.

    Args:
        source: a config: every rank reads a part of its training data, without augmentation. Or a loader of all of the
            data: only rank 0 reads it.
    """
    divided = isinstance(source, CfgNode)
    with preserve_rng_state(), inference_context(model):
        loader = build_test_loader(source, train_dataset_name(source)) if isinstance(source, CfgNode) else source
        device = next(model.parameters()).device
        found: list[Tensor] = []
        if divided or comm.is_main_process():
            found = [embed(move_to_device(batch, device)).float().cpu() for batch in loader]
    return torch.cat([features for rank in comm.all_gather(found) for features in rank])


def whiten(features: Tensor, dim: int) -> Tensor:
    """The ``dim`` principal components of ``[N, D]``, each with variance 1, in rows of length 1; float64 ``[N, dim]``.

    Directions without variance give zeros.
    """
    centered = (features - features.mean(0)).double()
    variances, directions = torch.linalg.eigh(centered.T @ centered / len(centered))  # in ascending order
    scales = (variances[-dim:] + 1e-5 * variances[-1]).rsqrt()
    return F.normalize(centered @ directions[:, -dim:] * scales)


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


def check_power(reweight_pow: float) -> float:
    """Raises ValueError if the power is negative."""
    if not reweight_pow >= 0:
        raise ValueError(f"reweight_pow must be a number >= 0, got {reweight_pow!r}")
    return reweight_pow


def loss_weights(sizes: Tensor, power: float) -> Tensor:
    """The weights of clusters with these sizes ``[K]``: ``(size + 1e-10) ** -power``, divided by their sum."""
    weights = (sizes.float() + 1e-10) ** -power
    return weights / weights.sum()


def use_loss_weight(model: Any) -> None:
    """Let ``head.loss`` weight classes by ``loss_weight`` of the model, if it has ``class_weight``.

    A checkpoint does not hold this, so it is done at the start of every run, also of a resumed run.
    """
    loss: Any = getattr(getattr(model, "head", None), "loss", None)
    if hasattr(loss, "class_weight"):
        loss.class_weight = model.loss_weight


def put_sizes(storage: EventStorage, sizes: Tensor) -> None:
    """Store the smallest and the largest of cluster sizes ``[K]``, and how many clusters are empty."""
    found = {"smallest": sizes.min(), "largest": sizes.max(), "empty": (sizes == 0).sum()}
    storage.put_scalars(**{f"clusters/{name}": int(value) for name, value in found.items()}, smoothing_hint=False)
