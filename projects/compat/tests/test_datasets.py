import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from trainkit.data.common import ToIterableDataset


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine with one core
@pytest.mark.parametrize(
    ("shard", "expected"), [(True, [0, 20, 10, 30, 40]), (False, [0, 0, 10, 10, 20, 20, 30, 30])]
)
def test_a_sampled_stream_is_divided_among_workers_in_chunks(shard, expected):
    samples = [0, 10, 20, 30, 40]
    dataset = ToIterableDataset(
        samples, SequentialSampler(samples), shard_sampler=shard, shard_chunk_size=2
    )
    loader = DataLoader(dataset, batch_size=None, num_workers=2, generator=torch.Generator())
    assert [*loader][:8] == expected  # the loader takes one sample from each worker in turn
