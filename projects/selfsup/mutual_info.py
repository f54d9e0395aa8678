"""The similarity of two partitions of the same samples."""

import torch
from torch import Tensor


def normalized_mutual_info(a: Tensor, b: Tensor) -> float:
    """Mutual information of two labelings divided by the mean of their entropies, in [0, 1]; 1 if both are constant.

    Args:
        a, b: int64 ``[N]``, from 0.
    """
    width = int(b.max()) + 1
    counts = torch.bincount(a * width + b, minlength=(int(a.max()) + 1) * width)
    joint = counts.reshape(-1, width).to(torch.float64) / len(a)
    entropy_a, entropy_b, entropy = (torch.special.entr(p).sum() for p in (joint.sum(1), joint.sum(0), joint))
    mean = (entropy_a + entropy_b) / 2
    return 1.0 if mean == 0 else float((entropy_a + entropy_b - entropy) / mean)
