"""A sampler that draws every sample once, over all ranks."""

from collections.abc import Iterator

from torch.utils.data import Sampler

from trainkit.utils import comm


class InferenceSampler(Sampler[int]):
    """A contiguous part of ``range(size)`` per rank: each index once, and lengths that differ by at most 1.

    A part is empty if there are fewer samples than ranks.

    Raises:
        ValueError: ``size`` is less than 1.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be >= 1 sample, got {size}: an empty dataset cannot be evaluated on")
        self._local_indices = self._get_local_indices(size, comm.get_data_world_size(), comm.get_data_rank())

    @staticmethod
    def _get_local_indices(total_size: int, world_size: int, rank: int) -> range:
        share, rest = divmod(total_size, world_size)  # each of the first ranks takes one more sample
        return range(rank * share + min(rank, rest), (rank + 1) * share + min(rank + 1, rest))

    def __iter__(self) -> Iterator[int]:
        return iter(self._local_indices)

    def __len__(self) -> int:
        return len(self._local_indices)
