"""A sampler that draws every sample once, over all ranks."""

from collections.abc import Iterator
from itertools import islice

from torch.utils.data import BatchSampler, Sampler

from trainkit.utils import comm


class InferenceSampler(Sampler[int]):
    """A contiguous part of ``range(size)`` per rank: each index once, and lengths that differ by at most 1.

    A part is empty if there are fewer samples than ranks.

    Args:
        logical_ranks: if not 0, each of so many logical ranks has such a part; a rank has the parts (``shards``) of its
            logical ranks.

    Raises:
        ValueError: ``size`` is less than 1.
    """

    def __init__(self, size: int, logical_ranks: int = 0) -> None:
        if size < 1:
            raise ValueError(f"size must be >= 1 sample, got {size}: an empty dataset cannot be evaluated on")
        num = comm.get_data_world_size()
        shards = logical_ranks or num
        own = self._get_local_indices(shards, num, comm.get_data_rank())
        self.shards = [self._get_local_indices(size, shards, shard) for shard in own]
        self._local_indices = range(self.shards[0].start, self.shards[-1].stop)

    @staticmethod
    def _get_local_indices(total_size: int, world_size: int, rank: int) -> range:
        share, rest = divmod(total_size, world_size)  # each of the first ranks takes one more sample
        return range(rank * share + min(rank, rest), (rank + 1) * share + min(rank + 1, rest))

    def __iter__(self) -> Iterator[int]:
        return iter(self._local_indices)

    def __len__(self) -> int:
        return len(self._local_indices)


class ShardBatchSampler(BatchSampler):
    """Batches of an `InferenceSampler`; no batch has samples of two logical ranks (``shards`` of the sampler)."""

    sampler: InferenceSampler
    most: int | None = None  # batches of a shard; None: all of them

    def __iter__(self) -> Iterator[list[int]]:
        for shard in self.sampler.shards:
            yield from islice(BatchSampler(shard, self.batch_size, self.drop_last), self.most)

    def __len__(self) -> int:
        return sum(1 for _ in self)
