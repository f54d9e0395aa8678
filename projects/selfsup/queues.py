"""Embeddings of earlier batches, as buffers of a model: each rank has its own, and a checkpoint holds all of them."""

import torch
from torch import Tensor
from torch.nn import functional as F


def new_queue(length: int, dim: int) -> Tensor:
    """``[length, dim]``, filled with random directions, which real embeddings soon replace."""
    return F.normalize(torch.randn(length, dim))


@torch.no_grad()
def push(queue: Tensor, rows: Tensor) -> None:
    """Insert ``rows`` ``[N, dim]`` at the front of ``queue`` ``[length, dim]``, in place; remove the oldest rows."""
    newest_first = torch.cat([rows, queue])
    queue.copy_(newest_first[: len(queue)])
