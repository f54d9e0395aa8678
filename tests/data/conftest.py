import pytest
from torch.utils.data import IterableDataset

from trainkit.utils import comm


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


@pytest.fixture
def as_rank(monkeypatch):
    """Make this process look like one rank of several to whatever is built afterwards."""

    def as_rank(rank, world_size):
        monkeypatch.setattr(comm, "get_rank", lambda: rank)
        monkeypatch.setattr(comm, "get_world_size", lambda: world_size)

    return as_rank
