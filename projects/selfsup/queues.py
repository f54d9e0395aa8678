"""Embeddings of former batches, as buffers of a model: each rank has its own, and a checkpoint holds them all."""

import torch
from torch import Tensor
from torch.nn import functional as F


def new_queue(length: int, dim: int) -> Tensor:
    """``[length, dim]``, filled with random directions, which real embeddings soon push out."""
    return F.normalize(torch.randn(length, dim))


@torch.no_grad()
def push(queue: Tensor, rows: Tensor) -> None:
    """Put ``rows`` ``[N, dim]`` in front of ``queue`` ``[length, dim]``, in place; the oldest ones fall out."""
    queue.copy_(torch.cat([rows, queue])[: len(queue)])
