"""Samples of datasets in a random order: what they contain, their classes, and batches of them."""

import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sized
from numbers import Integral, Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset
from trainkit.projects.preflight.job import digest

_MOST = 1_000_000  # indices that are drawn
_LABELS = ("label", "labels", "target", "targets", "y")


class Sample(NamedTuple):
    """The digest of what a sample contains, and its class: a list of one number, or an empty list."""

    content: str
    classes: list[int]


def has_indices(dataset: Any) -> bool:
    return isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset)


def draw_indices(length: int) -> list[int]:
    """Indices in a random order that is always the same; of long datasets some of them."""
    return random.Random(0).sample(range(length), min(length, _MOST))


def read_samples(dataset: Any, sec: float) -> Iterator[Sample]:
    """Samples in a random order, as many as can be read in some seconds."""
    indices = draw_indices(len(dataset))
    end = time.monotonic() + sec
    for index in indices:
        sample = dataset[index]
        yield Sample(content_of(sample), classes_of(sample))
        if time.monotonic() > end:
            return


def content_of(sample: Any) -> str:
    """The digest of the arrays and objects of a sample; of its texts if it has nothing else.

    Numbers are left out: an index or a path may differ between two copies of a sample.
    """
    leaves = [leaf for leaf in tree_leaves(sample) if not _is_number(leaf)]
    texts = [leaf for leaf in leaves if isinstance(leaf, str)]
    others = [leaf for leaf in leaves if not isinstance(leaf, str)]
    return digest(others or texts)


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.numel() == 1
    if isinstance(leaf, np.ndarray):
        return leaf.size == 1
    return leaf is None or isinstance(leaf, Number)


def is_random(dataset: Any) -> bool:
    """Whether reading one index several times gives different contents."""
    for index in draw_indices(len(dataset))[:8]:
        contents = {content_of(dataset[index]) for _ in range(3)}
        if len(contents) > 1:
            return True
    return False


def classes_of(item: Any, ndim: int = 0) -> list[int]:
    """The class of a sample, or those of a batch (``ndim`` 1); none if it has none."""
    found = None
    if isinstance(item, Mapping):
        names = [name for name in _LABELS if name in item]
        if names:
            found = item[names[0]]
    elif isinstance(item, list | tuple) and len(item) == 2:
        found = item[1]
    if not isinstance(found, Tensor | Integral):
        return []
    label = torch.as_tensor(found)
    if label.is_floating_point() or label.ndim != ndim:
        return []
    return label.reshape(-1).tolist()


def draw_batches(loader: Any, num_samples: int) -> list[Any]:
    """Batches of random samples; of a loader without indices its first batches, up to eight."""
    dataset: Any = getattr(loader, "dataset", None)
    batch_size: Any = getattr(loader, "batch_size", None)
    if not has_indices(dataset) or not batch_size:
        return [*itertools.islice(loader, 8)]
    indices = draw_indices(len(dataset))[:num_samples]
    batches = []
    for start in range(0, len(indices), batch_size):
        samples = [dataset[index] for index in indices[start : start + batch_size]]
        batches.append(loader.collate_fn(samples))
    return batches
