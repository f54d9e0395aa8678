"""What a dataset with ``set_epoch`` is told, in each process that loads samples."""

import itertools
import logging

import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Sampler, Subset

from tests.engine.tiny import through_a_file
from trainkit.data import (
    CombinedLoader,
    InferenceSampler,
    InfiniteSampler,
    MapDataset,
    ResumableLoader,
    ToIterableDataset,
    TrainingSampler,
    build_batch_data_loader,
)

# a machine with few cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZE = 11


class Told:
    """Each sample is the epoch in which it is loaded."""

    epoch = -1

    def __init__(self, size=SIZE):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch


class Wrapper:
    """A wrapper of a user's, which knows nothing of epochs."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


class OtherName(Wrapper):
    def __init__(self, base):
        self.base = base

    dataset = property(lambda self: self.base)


class Slots:
    __slots__ = ("dataset",)

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


class Halving(Wrapper):
    """A wrapper with epochs of its own."""

    def set_epoch(self, epoch):
        self.dataset.set_epoch(epoch // 2)


class Parts(Wrapper):
    def __init__(self, dataset):
        self.parts = {"all": dataset, "none": [1, 2]}
        self.shuffled_by = InfiniteSampler  # a class is told nothing

    dataset = property(lambda self: self.parts["all"])


class LongList:
    """A wrapper with a list that is too long to be looked at, except under one name."""

    def __init__(self, dataset, name):
        self.size = len(dataset)
        setattr(self, name, [dataset] + [0] * 1000)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        [parts] = [value for value in vars(self).values() if isinstance(value, list)]
        return parts[0][index]


class Noise:
    """A transform whose result is its epoch."""

    epoch = -1

    def __call__(self, sample):
        return self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch


NOISE = Noise()


class Compose:
    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self, sample):
        for transform in self.transforms:
            sample = transform(sample)
        return sample


def same(sample):
    return sample


WRAPPERS = {
    "none": Told,
    "MapDataset": lambda: MapDataset(Told(), same),
    "Subset": lambda: Subset(Told(50), range(SIZE)),
    "ConcatDataset": lambda: ConcatDataset([[0] * 0, Told(4), MapDataset(Told(7), same)]),
    "of a user": lambda: Wrapper(Subset(MapDataset(Told(), same), range(SIZE))),
    "of a user, with another name": lambda: MapDataset(OtherName(Wrapper(Told())), same),
    "with slots": lambda: Slots(Told()),
    "in a dict": lambda: Parts(Told()),
    "as a stream": lambda: ToIterableDataset(Told(), TrainingSampler(SIZE, seed=0)),
}


def make(dataset, num_workers=0, batch_size=4, **options):
    sampler = TrainingSampler(SIZE, seed=0)
    return build_batch_data_loader(
        dataset,
        sampler,
        None,
        single_gpu_batch_size=batch_size,
        num_workers=num_workers,
        seed=0,
        **options,
    )


def take(loader, num_batches):
    return list(itertools.islice(iter(loader), num_batches))


def expected_batches(first, last, batch_size=4):
    """Sample p of the stream is of epoch p // 11, written out for batches of 4."""
    stream = [0] * 11 + [1] * 11 + [2] * 11 + [3] * 11
    batches = [stream[start : start + batch_size] for start in range(0, 44, batch_size)]
    return batches[first:last]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_sample_is_loaded_in_its_epoch_with_any_workers_also_after_a_resume(
    wrapper, num_workers
):
    loader = make(WRAPPERS[wrapper](), num_workers)
    batches = iter(loader)
    delivered = [next(batches) for _ in range(4)]
    state = through_a_file(loader.state_dict())
    resumed = make(WRAPPERS[wrapper](), num_workers)
    resumed.load_state_dict(state)

    # the third batch has three samples of epoch 0 and one of epoch 1
    assert delivered == expected_batches(0, 4)
    assert delivered[2] == [0, 0, 0, 1]
    assert take(resumed, 7) == expected_batches(4, 11)


@pytest.mark.slow
def test_workers_that_are_spawned_or_stay_are_told_too():
    options = {"multiprocessing_context": "forkserver", "persistent_workers": True}
    assert take(make(Told(), 1, **options), 6) == expected_batches(0, 6)


def test_ranks_count_the_samples_of_all_ranks(as_rank):
    shares = []
    for rank in range(2):
        as_rank(rank, 2)
        shares.append(take(make(Told(), 1, batch_size=2), 11))
    together = [
        [first[0], second[0], first[1], second[1]] for first, second in zip(*shares, strict=True)
    ]
    assert together == expected_batches(0, 11)


def test_a_wrapper_with_set_epoch_decides_what_it_tells():
    assert take(make(Halving(Told())), 11) == [
        [epoch // 2 for epoch in batch] for batch in expected_batches(0, 11)
    ]


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "is_told"),
    [
        (LongList(Told(), "datasets"), list, True),
        (LongList(Told(), "parts"), list, False),
        (MapDataset(range(SIZE), Noise()), list, True),
        (MapDataset(range(SIZE), Compose(same, Noise())), list, False),
        (MapDataset(range(SIZE), lambda sample: NOISE(sample)), list, False),
        (range(SIZE), lambda samples: [NOISE(sample) for sample in samples], False),
    ],
)
def test_what_is_inside_a_long_list_a_transform_or_a_function_is_not_told(
    dataset, collate_fn, is_told
):
    delivered = take(make(dataset, collate_fn=collate_fn), 4)
    assert delivered == (expected_batches(0, 4) if is_told else [[-1] * 4] * 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_of_one_dataset_do_not_disturb_each_other(num_workers):
    dataset = Told()
    loaders = {"small": make(dataset, num_workers, 4), "large": make(dataset, num_workers, 8)}
    batches = take(CombinedLoader(loaders, mode="each"), 5)
    assert [batch["small"] for batch in batches] == expected_batches(0, 5)
    assert [batch["large"] for batch in batches] == expected_batches(0, 5, batch_size=8)


class Finite(Sampler):
    """A finite sampler of a user's with a state, for which only a trainer or a user knows the epoch."""

    def __iter__(self):
        return iter(range(SIZE))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_the_epoch_of_a_finite_sampler_is_told_to_the_loader_and_is_part_of_its_position(
    num_workers,
):
    def finite():
        return ResumableLoader(
            Wrapper(Told()),
            batch_size=4,
            sampler=Finite(),
            collate_fn=list,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )

    loader = finite()
    assert [*loader] == [[-1] * 4, [-1] * 4, [-1] * 3]
    loader.set_epoch(7)
    batches = iter(loader)
    assert next(batches) == [7] * 4
    loader.set_epoch(8)  # of the next pass
    assert next(batches) == [7] * 4
    state = through_a_file(loader.state_dict())
    assert [*batches] == [[7] * 3]
    assert [*loader] == [[8] * 4, [8] * 4, [8] * 3]

    resumed = finite()
    resumed.load_state_dict(state)
    assert [*resumed] == [[7] * 3]


class ToldStream(IterableDataset):
    """Each worker gives its number, and the epoch."""

    epoch = -1

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        number = 0 if worker is None else worker.id
        assert worker is None or isinstance(worker.dataset, ToldStream)  # not something around it
        yield number, self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize(("num_workers", "stays"), [(0, False), (1, True), (2, False), (2, True)])
def test_a_stream_is_told_its_pass_in_every_worker(num_workers, stays):
    loader = build_batch_data_loader(
        ToldStream(), None, 1, num_workers=num_workers, persistent_workers=stays
    )
    workers = range(max(num_workers, 1))
    assert [*loader] == [[(worker, -1)] for worker in workers]
    for epoch in (3, 4):
        loader.set_epoch(epoch)
        assert [*loader] == [[(worker, epoch)] for worker in workers]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_of_indices_tells_the_epoch_of_each_sample(num_workers):
    indexed = ToIterableDataset(Told(), TrainingSampler(SIZE, seed=0), shard_chunk_size=4)
    stream = MapDataset(indexed, same)  # has no indices any more
    batches = take(build_batch_data_loader(stream, None, 4, num_workers=num_workers), 11)
    assert batches == expected_batches(0, 11)


def test_an_evaluation_is_told_nothing_and_who_is_told_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="trainkit.data"):
        make(Wrapper(Told()))
        evaluation = build_batch_data_loader(Told(), InferenceSampler(SIZE), 11)
    assert [*evaluation] == [[-1] * 11]
    [text] = caplog.messages
    assert text.startswith("set_epoch(epoch) ")
    assert text.endswith(": Told")


def test_what_cannot_be_told_is_named_when_the_loader_is_built(caplog):
    options = {"batch_size": None, "sampler": TrainingSampler(SIZE)}
    ResumableLoader(Told(), **options)
    assert not caplog.text
    ResumableLoader(Told(), num_workers=1, **options)
    assert "Told; give a batch size" in caplog.text
