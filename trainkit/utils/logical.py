"""Logical ranks: parts of a batch that stay the same on any number of processes that divides their number.

Logical rank ``i`` gets the samples ``p`` of the stream with ``p % logical_ranks == i``, so a process has the logical
ranks ``i`` for which ``i % world_size`` is its rank. Sums over logical ranks are computed in one binary tree: a node is
a set of ranks that are equal modulo ``m``; its two children are the sets of those that are equal modulo ``2 * m``. A
process has a whole subtree.
"""

from typing import Any


def own_ranks(logical_ranks: int, rank: int, world_size: int) -> list[int]:
    """The logical ranks of a process, in an order in which neighbours have the same parent in the tree."""
    owned, stride = [rank], world_size
    while stride < logical_ranks:
        owned = [own + more for own in owned for more in (0, stride)]
        stride *= 2
    return owned


def tree_sum(parts: Any) -> Any:
    """The sum over the first dimension (ranks in ascending order) of an array or a tensor, in the order of the tree."""
    while len(parts) % 2 == 0:
        half = len(parts) // 2
        parts = parts[:half] + parts[half:]
    return parts.sum(0)  # one process, or an odd number of processes, which cannot have logical ranks
