"""Which logical ranks a process has.

Logical rank ``i`` has the samples ``p`` of the stream with ``p % num == i``. A process has the logical ranks whose
remainder by the number of processes is its own rank: a whole subtree of the sum over logical ranks. A node of the tree
is a set of ranks that are equal modulo ``m``; its children are the sets of those that are equal modulo ``2 m``.
"""

from trainkit.utils import comm


def own_ranks(num: int) -> list[int]:
    """The logical ranks of this process, of ``num``; neighbours in this order have the same parent in the tree."""
    owned, stride = [comm.get_rank()], comm.get_world_size()
    while stride < num:
        owned = [own + more for own in owned for more in (0, stride)]
        stride *= 2
    return owned
