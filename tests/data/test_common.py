import pickle
import random

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.data.conftest import Stream
from trainkit.data.common import DatasetFromList, MapDataset


def times_ten_if_even(sample):
    return None if sample % 2 else sample * 10


def test_the_sample_in_the_place_of_a_rejected_one_is_a_function_of_the_index():
    def draw(order):
        dataset = MapDataset(list(range(20)), times_ten_if_even)
        samples = {index: dataset[index] for index in order}
        return [samples[index] for index in range(20)]

    states = random.getstate(), torch.get_rng_state()
    forward = draw(range(20))

    # neither earlier samples nor earlier rejections matter
    assert forward == draw(reversed(range(20)))
    assert forward[::2] == [index * 10 for index in range(0, 20, 2)]
    assert len({*forward[1::2]}) > 3  # not one and the same sample in all places
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])

    tried = []
    dataset = MapDataset(list(range(5)), tried.append)  # append gives None
    with pytest.raises(RuntimeError, match="None for 1000 samples"):
        dataset[3]
    assert len(dataset) == 5
    assert len(tried) == 1000
    assert tried[0] == 3
    assert {*tried} == {*range(5)}


@pytest.mark.parametrize("dataset_class", [MapDataset, type("Mapped", (MapDataset,), {})])
def test_a_mapped_stream_is_a_stream_without_the_rejected_samples(dataset_class):
    dataset = dataset_class(Stream([1, 2, 3, 4]), times_ten_if_even)
    assert isinstance(dataset, IterableDataset)
    assert list(dataset) == [20, 40]
    with pytest.raises(TypeError):
        len(dataset)


def test_mapped_datasets_survive_pickling_into_a_spawned_worker():
    listed, stream = pickle.loads(
        pickle.dumps([MapDataset(of, times_ten_if_even) for of in ([2, 4], Stream([2, 4]))])
    )
    assert [listed[0], listed[1]] == [*stream] == [20, 40]


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
    with pytest.raises(IndexError):
        dataset[-6]
    assert len(DatasetFromList([], serialize=serialize)) == 0
    without_copies = DatasetFromList(samples, copy=False, serialize=False)
    assert without_copies[0] is samples[0]


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
        assert dataset[index].dtype == tensor.dtype
        assert dataset[index].requires_grad == tensor.requires_grad
        with torch.no_grad():
            dataset[index].zero_()  # writable, and a copy
        assert torch.equal(dataset[index].to_dense(), tensor.to_dense())

    rows = [*torch.zeros(1000, 100)]
    # 400 MB with the storage in each row
    assert len(pickle.dumps(DatasetFromList(rows))) < 1000 * (400 + 250)
