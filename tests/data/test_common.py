import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from trainkit.data.common import DatasetFromList, MapDataset, ToIterableDataset
from trainkit.data.samplers import TrainingSampler


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Counter:
    """Multiplies by ten what it accepts, and counts its calls."""

    def __init__(self, accepted):
        self.accepted, self.calls = set(accepted), 0

    def __call__(self, sample):
        self.calls += 1
        return sample * 10 if sample in self.accepted else None


def times_ten_if_even(sample):
    return None if sample % 2 else sample * 10


def test_a_mapped_dataset_gives_the_mapped_sample_of_each_index():
    dataset = MapDataset([1, 2, 3], lambda sample: sample * 10)

    assert len(dataset) == 3
    assert [dataset[index] for index in range(3)] == [10, 20, 30]


def test_the_sample_in_the_place_of_a_rejected_one_is_a_function_of_the_index():
    def draw(order):
        dataset = MapDataset(list(range(20)), times_ten_if_even)
        samples = {index: dataset[index] for index in order}
        return [samples[index] for index in range(20)]

    forward = draw(range(20))

    assert forward == draw(reversed(range(20)))  # neither earlier samples nor earlier rejections matter
    assert forward[::2] == [index * 10 for index in range(0, 20, 2)]
    assert len({*forward[1::2]}) > 3  # not one and the same sample in all places


def test_a_rejected_sample_leaves_the_global_random_state_alone():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert MapDataset(list(range(20)), times_ten_if_even)[7] is not None

    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 12, 30])
def test_every_index_is_tried_once_before_all_are_found_bad(size):
    tried = []
    dataset = MapDataset(list(range(size)), tried.append)  # append gives None

    for index in range(size):
        tried.clear()
        with pytest.raises(RuntimeError, match=f"None for each of the {size} samples"):
            dataset[index]
        assert tried[0] == index
        assert sorted(tried) == list(range(size))


def test_the_only_good_sample_is_found_from_everywhere():
    dataset = MapDataset(list(range(12)), Counter(accepted=[5]))
    assert [dataset[index] for index in range(12)] == [50] * 12


def test_a_mapped_stream_is_a_stream_without_the_rejected_samples():
    dataset = MapDataset(Stream([1, 2, 3, 4]), times_ten_if_even)

    assert isinstance(dataset, IterableDataset)
    assert list(dataset) == [20, 40]
    with pytest.raises(TypeError):
        len(dataset)


def test_a_subclass_that_maps_a_stream_is_a_stream_too():
    class Mapped(MapDataset):
        pass

    assert [*Mapped(Stream([1, 2]), times_ten_if_even)] == [20]


@pytest.mark.parametrize("dataset", [[2, 4], Stream([2, 4])])
def test_mapped_datasets_survive_pickling_into_a_spawned_worker(dataset):
    copied = pickle.loads(pickle.dumps(MapDataset(dataset, times_ten_if_even)))
    samples = copied if isinstance(copied, IterableDataset) else [copied[0], copied[1]]
    assert list(samples) == [20, 40]


@pytest.mark.parametrize("serialize", [True, False])
def test_a_list_dataset_gives_its_samples_and_keeps_them_unchanged(serialize):
    samples = [{"image": [index]} for index in range(3)] + ["text", None]
    dataset = DatasetFromList(samples, serialize=serialize)

    dataset[1]["image"].append("changed")

    assert len(dataset) == 5
    assert [dataset[index] for index in range(5)] == samples
    assert dataset[-1] is None
    assert dataset[-2] == "text"
    assert list(dataset) == samples  # ends with an IndexError, as a list does


def test_a_list_dataset_keeps_tensors_as_they_are():
    tensors = [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3),
        torch.empty(0, 2),
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.tensor([True]),
        torch.ones(1, requires_grad=True),
        torch.eye(2).to_sparse(),
    ]
    dataset = DatasetFromList(tensors)

    for index, tensor in enumerate(tensors):
        assert (dataset[index].dtype, dataset[index].requires_grad) == (tensor.dtype, tensor.requires_grad)
        assert torch.equal(dataset[index].to_dense(), tensor.to_dense())
        with torch.no_grad():
            dataset[index].zero_()  # writable, and a copy
        assert torch.equal(dataset[index].to_dense(), tensor.to_dense())


def test_the_views_in_a_list_dataset_do_not_drag_their_whole_storage_along():
    rows = [*torch.zeros(1000, 100)]
    assert len(pickle.dumps(DatasetFromList(rows))) < 1000 * (400 + 250)  # 400 MB with the storage in each row


def test_a_list_dataset_without_copies_hands_out_the_samples_themselves():
    sample = {"a": 1}
    assert DatasetFromList([sample], copy=False, serialize=False)[0] is sample
    assert DatasetFromList([sample], copy=True, serialize=False)[0] is not sample


@pytest.mark.parametrize(("serialize", "message"), [(True, "index out of range"), (False, "list index out of range")])
@pytest.mark.parametrize("index", [2, -3])
def test_an_index_outside_of_a_list_dataset_is_an_index_error(serialize, message, index):
    with pytest.raises(IndexError, match=message):
        DatasetFromList([1, 2], serialize=serialize)[index]


def test_an_empty_list_dataset_has_length_0():
    assert len(DatasetFromList([])) == 0


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine with one core
@pytest.mark.parametrize(
    ("num_workers", "shard", "chunk", "expected"),
    [
        (0, True, 1, [0, 10, 20, 30, 40]),
        (2, True, 1, [0, 10, 20, 30, 40]),
        (2, True, 2, [0, 20, 10, 30, 40]),
        (2, False, 1, [0, 0, 10, 10, 20, 20, 30, 30, 40, 40]),
    ],
)
def test_a_sampled_stream_is_divided_among_workers_in_chunks(num_workers, shard, chunk, expected):
    samples = [0, 10, 20, 30, 40]
    dataset = ToIterableDataset(samples, SequentialSampler(samples), shard_sampler=shard, shard_chunk_size=chunk)
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, generator=torch.Generator())

    assert [*loader] == expected  # the loader takes one sample from each worker in turn


def test_a_sampled_stream_refuses_what_it_cannot_sample():
    sampler = TrainingSampler(3, seed=0)
    with pytest.raises(TypeError, match="must be map-style, got the iterable Stream"):
        ToIterableDataset(Stream([1]), sampler)
