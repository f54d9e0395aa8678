import itertools
import logging
import os
import random
import threading
import traceback

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from tests.data.conftest import Stream
from tests.engine.tiny import through_a_file
from trainkit.data import (
    DatasetFromList,
    InferenceSampler,
    MapDataset,
    ResumableLoader,
    TrainingSampler,
    build_batch_data_loader,
    resume_obstacle,
    trivial_batch_collator,
)
from trainkit.data.seeding import splitmix64

# a machine with few cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZE = 11


class Drawing(Dataset):
    """Each sample is its index and one number of each global generator."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, random.random(), float(np.random.random()), torch.rand(()).item()


class Counting(Sampler):
    """A finite sampler of a user's, with a state."""

    def __init__(self):
        self.epoch, self.count = 0, 0

    def __iter__(self):
        while self.count < SIZE:
            self.count += 1
            yield (self.count * 7 + self.epoch) % SIZE
        self.epoch, self.count = self.epoch + 1, 0

    def state_dict(self):
        return vars(self)  # the living dict, as torch's state_dicts are

    def load_state_dict(self, state):
        self.epoch, self.count = state["epoch"], state["count"]


ORDERS = {  # the tests of other samplers have more
    "training": lambda seed: {"sampler": TrainingSampler(SIZE, seed=seed), "batch_size": 4},
    "own": lambda seed: {"sampler": Counting(), "batch_size": 4},
}


def make(order="training", num_workers=0, *, seed=3, dataset=None, **options):
    dataset = Drawing() if dataset is None else dataset
    options = {"collate_fn": list, **ORDERS[order](seed), **options}
    return ResumableLoader(dataset, seed=seed, num_workers=num_workers, **options)


def endless(loader):
    while True:
        yield from loader


def take(loader, num_batches):
    return [*itertools.islice(endless(loader), num_batches)]


def columns(batches):
    return [*zip(*(sample for batch in batches for sample in batch), strict=True)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"num_workers": 2, "prefetch_factor": 3}, {"num_workers": 0}),
        ({"num_workers": 0}, {"num_workers": 3, "prefetch_factor": 1, "persistent_workers": True}),
    ],
)
def test_a_resumed_loader_delivers_what_the_uninterrupted_one_would_have(order, before, after):
    uninterrupted = take(make(order), 12)

    interrupted = make(order, **before)
    batches = endless(interrupted)
    delivered = [next(batches) for _ in range(5)]
    state, names = through_a_file(interrupted.state_dict()), interrupted.names_of_last(2)
    assert names == [
        [f"sample {index} of Drawing" for index, *_ in batch] for batch in delivered[3:]
    ]
    resumed = make(order, seed=4, **after)
    resumed.load_state_dict(state)

    assert delivered == uninterrupted[:5]
    assert take(resumed, 7) == uninterrupted[5:]
    # without the state, or with another seed, it is something else
    assert take(make(order), 7) != uninterrupted[5:]
    for column, other in zip(
        columns(uninterrupted)[1:], columns(take(make(order, seed=4), 12))[1:], strict=True
    ):
        assert len({*column, *other}) == 2 * len(column)


@pytest.mark.parametrize("order", ORDERS)
def test_a_position_can_be_asked_for_and_loaded_at_any_time(order):
    reference = take(make(order), 8)
    loader = make(order, num_workers=1, persistent_workers=True)
    states = [through_a_file(loader.state_dict())]
    batches = endless(loader)
    for expected in reference[:4]:
        assert next(batches) == expected
        states.append(through_a_file(loader.state_dict()))
    del batches
    assert loader.state_dict() == states[4]  # the iterator is gone

    for place in (2, 2, 0, 4, 1):
        loader.load_state_dict(states[place])
        assert loader.state_dict() == states[place]
        batches = endless(loader)
        assert [next(batches) for _ in range(3)] == reference[place : place + 3]


class Recording(Drawing):
    def __init__(self):
        self.loaded = []

    def __getitem__(self, index):
        self.loaded.append(index)
        return super().__getitem__(index)


def test_indices_are_drawn_again_without_loading():
    before, dataset = make("own"), Recording()
    delivered = take(before, 2)
    after = make("own", dataset=dataset)
    after.load_state_dict(before.state_dict())
    batch = next(iter(after))
    assert [*delivered, batch] == take(make("own"), 3)
    assert dataset.loaded == [index for index, *_ in batch]


def test_states_of_earlier_versions_are_loaded():
    reference = take(make("own"), 5)
    loader = make("own")
    # the state of the sampler after two batches, not before the pass; "over": a pass has ended
    state = {"kind": "Counting", "seed": 3, "position": 8, "order": {"epoch": 0, "count": 8}}
    loader.load_state_dict(state)
    assert take(loader, 3) == reference[2:]
    loader.load_state_dict(
        {**state, "position": 11, "order": {"epoch": 1, "count": 0}, "over": True}
    )
    assert take(loader, 2) == reference[3:]


@pytest.mark.parametrize("order", ["training"])
def test_another_number_of_ranks_goes_on_with_the_same_global_batches(order, as_rank):
    def loaders(world_size):
        for rank in range(world_size):
            as_rank(rank, world_size)
            yield make(order, batch_size=12 // world_size)

    def global_batches(loaders, num_batches):
        shares = zip(*(take(loader, num_batches) for loader in loaders), strict=True)
        return [sorted(itertools.chain.from_iterable(of_all_ranks)) for of_all_ranks in shares]

    expected = global_batches(loaders(1), 6)
    before = [*loaders(3)]
    assert global_batches(before, 2) == expected[:2]
    assert before[1].state_dict()["position"] == 24  # the samples of all ranks
    after = [*loaders(2)]
    for loader in after:
        loader.load_state_dict(before[0].state_dict())

    assert global_batches(after, 4) == expected[2:]


def test_the_seed_of_the_checkpoint_wins_and_is_logged_and_another_kind_of_order_starts_again(
    caplog,
):
    first = make(seed=5)
    expected = take(first, 4)[2:]
    take(first, 2)

    resumed = make(seed=6)
    with caplog.at_level(logging.INFO, logger="trainkit.data"):
        resumed.load_state_dict(first.state_dict())
    assert take(resumed, 2) == expected
    assert [record.args for record in caplog.records] == [(5, 6)]
    other = make("own")
    other.load_state_dict(first.state_dict())
    assert take(other, 2) == take(make("own"), 2)
    assert "from TrainingSampler, which cannot be used with Counting" in caplog.text


@pytest.mark.parametrize(
    ("make_loader", "reason"),
    [
        (lambda: [1, 2], "the data loader (list) has no state_dict"),
        (lambda: make(in_order=False), "in_order=False"),
        (lambda: ResumableLoader([1], batch_size=None), "batch_size=None"),
        (lambda: ResumableLoader([1, 2], shuffle=True), "RandomSampler has no state_dict"),
        (lambda: build_batch_data_loader(Stream(range(100)), None, 1), "Stream has no indices"),
    ],
)
def test_a_loader_that_cannot_be_resumed_says_why(make_loader, reason):
    assert reason in resume_obstacle(make_loader())


def test_a_loader_that_cannot_be_resumed_loads_what_a_plain_one_does():
    found = []
    for loader_class in (ResumableLoader, DataLoader, DataLoader):
        torch.manual_seed(6 if len(found) < 2 else 7)
        batches = loader_class(Drawing(), batch_size=4, shuffle=True, collate_fn=list)
        found.append(
            [
                [(index, drawn) for batch in batches for index, _, _, drawn in batch],
                torch.rand(()).item(),
            ]
        )
    assert found[0] == found[1] != found[2]
    assert [*build_batch_data_loader(Stream(range(100)), None, 50)] == [
        [*range(50)],
        [*range(50, 100)],
    ]


class Greedy(Drawing):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        random.random(), np.random.randn(), torch.rand(index)
        return sample


def test_datasets_of_all_kinds_and_collating_draw_by_position_however_much_earlier_samples_drew():
    expected = take(make(), 5)
    for dataset in (
        Greedy(),
        ConcatDataset([Subset(Drawing(), range(5)), Subset(Drawing(), range(5, SIZE))]),
    ):
        assert take(make(dataset=MapDataset(dataset, tuple)), 5) == expected

    def collate(samples):
        return random.random(), np.random.random(), torch.rand(()).item()

    assert take(make(collate_fn=collate), 4) == take(make(collate_fn=collate, num_workers=2), 4)


def states():
    _, keys, *rest = np.random.get_state()
    return random.getstate(), keys.tolist(), rest, torch.get_rng_state().tolist()


def test_loading_without_workers_leaves_the_global_random_state_alone():
    def collate(samples):
        return samples, random.random(), np.random.randn(), torch.rand(())

    np.random.randn(1)  # NumPy's normal numbers come in pairs, the second one waits
    before = states()
    take(make(collate_fn=collate), 3)
    with pytest.raises(RuntimeError, match="ZeroDivisionError while"):
        take(make(collate_fn=lambda samples: 1 // 0), 1)
    assert states() == before


def test_each_pass_of_an_evaluation_draws_the_same_with_any_workers():
    options = {"sampler": InferenceSampler(SIZE)}
    kept = make(num_workers=2, persistent_workers=True, **options)
    passes = [[*kept], [*itertools.islice(kept, 1)], [*kept], [*make(**options)]]
    assert passes[0] == passes[2] == passes[3]
    assert passes[1] == passes[0][:1]
    assert len({sample[1] for batch in passes[0] for sample in batch}) == SIZE


class Transform:
    """A transform that a script imports as an object; its class and its module are never looked at."""

    def __call__(self, sample):
        return sample, random.random(), float(np.random.random()), torch.rand(()).item()


TRANSFORM = Transform()  # from transforms import train_transform
ROWS = [[index, index + 1, index + 2, index + 3] for index in range(SIZE)]


class ByPandas:
    """A container that draws; `DatasetFromList` takes a function that makes one."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index], random.random()


class Lazy(list):
    def __getitem__(self, index):
        return index, random.random()


def drawing_collate(samples):
    return samples, random.random(), float(np.random.random()), torch.rand(()).item()


@pytest.mark.parametrize(
    ("dataset", "collate_fn"),
    [
        (MapDataset(ROWS, TRANSFORM), list),
        (MapDataset(ROWS, np.random.permutation), list),  # a function of a C extension
        (MapDataset(ROWS, random.choice), list),
        (MapDataset(MapDataset(ROWS, random.choice), str), list),
        (ROWS, drawing_collate),
        (range(SIZE), random.choice),
        (DatasetFromList(ROWS, serialize=ByPandas), list),
        (Lazy(ROWS), list),
        (Subset(Lazy(ROWS), range(SIZE)), trivial_batch_collator),
        (ConcatDataset([ROWS[:4], MapDataset(ROWS[4:], TRANSFORM)]), trivial_batch_collator),
    ],
)
def test_random_numbers_do_not_depend_on_the_workers_whatever_draws_them(dataset, collate_fn):
    """Expected: the numbers of the published generator, seeded by hand for each sample."""

    def delivered(num_workers):
        random.seed(num_workers)  # what a loader leaves unseeded differs now
        np.random.seed(num_workers)
        batches = take(make(dataset=dataset, collate_fn=collate_fn, num_workers=num_workers), 5)
        return repr(batches)

    by_hand = []
    positions = itertools.count()
    key = splitmix64(3, 0)
    indices = iter(TrainingSampler(SIZE, seed=3))
    for _ in range(5):
        samples = []
        for index in itertools.islice(indices, 4):
            number = splitmix64(key, next(positions))
            random.seed(number)
            np.random.seed(number >> 32)
            torch.manual_seed(number & 0xFFFFFFFF)
            samples.append(dataset[index])
        by_hand.append(collate_fn(samples))

    assert delivered(0) == repr(by_hand)
    assert delivered(1) == repr(by_hand)
    assert delivered(2) == repr(by_hand)


class CountsSeeds:
    def __init__(self):
        self.count = 0

    def __call__(self, number):
        self.count += 1


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "num_seeds"),
    [
        (ROWS, default_collate, 0),
        (tuple(ROWS), trivial_batch_collator, 0),
        (range(SIZE), default_collate, 0),
        (TensorDataset(torch.arange(SIZE)), default_collate, 0),
        (DatasetFromList(ROWS), default_collate, 0),
        (DatasetFromList(ROWS, serialize=False), default_collate, 0),
        (Subset(DatasetFromList(ROWS), range(SIZE)), default_collate, 0),
        (ConcatDataset([ROWS[:4], Subset(ROWS, range(4, SIZE))]), default_collate, 0),
        (ROWS, list, 8),  # a collate function of the user
        (MapDataset(ROWS, str), default_collate, 8),
        (ConcatDataset([ROWS[:4], MapDataset(ROWS[4:], tuple)]), default_collate, 8),
    ],
)
def test_nothing_is_seeded_for_plain_lists_and_tensors(dataset, collate_fn, num_seeds, monkeypatch):
    seeds = CountsSeeds()
    monkeypatch.setattr("trainkit.data.fetch.seed_globals", seeds)
    take(make(dataset=dataset, collate_fn=collate_fn), 2)
    assert seeds.count == num_seeds


class Opened(Drawing):
    def __getitem__(self, index):
        return self.file


def open_file(worker_id):
    get_worker_info().dataset.file = f"opened by {worker_id}"


def test_a_worker_init_function_of_the_user_configures_the_dataset():
    batches = take(make(dataset=Opened(), num_workers=1, worker_init_fn=open_file), 1)
    assert {*batches[0]} == {"opened by 0"}


class Failing(Drawing):
    """Reading sample 2 calls a function."""

    def __init__(self, fail):
        self.fail = fail

    def __getitem__(self, index):
        return self.fail() if index == 2 else index


class FailingFiles(Failing):
    def sample_name(self, index):
        return f"scan_{index}.png"


def unreadable():
    raise FileNotFoundError(2, "no such image")


def end():
    raise StopIteration


def local_error(*args):
    class Local(Exception):
        """Cannot be pickled."""

    raise Local("is here")


def hang():
    threading.Event().wait()


def error_of(dataset, num_workers=1, **options):
    """The text of the error of the first batches."""
    loader = make(
        dataset=dataset,
        num_workers=num_workers,
        sampler=TrainingSampler(SIZE, shuffle=False),
        **options,
    )
    with pytest.raises(Exception) as caught:  # noqa: PT011
        take(loader, 4)
    text = "".join(traceback.format_exception(caught.value))
    for error in (caught.value, caught.value.__cause__, caught.value.__context__):
        if error is not None:
            error.__traceback__ = None  # it holds the iterator in a cycle, and torch then takes 10 s to end the workers
    return text


@pytest.mark.parametrize(
    ("num_workers", "dataset", "collate_fn", "text"),
    [
        (
            0,
            Failing(unreadable),
            list,
            "FileNotFoundError while loading sample 2 of Failing: [Errno 2] no such image",
        ),
        (
            1,
            MapDataset(FailingFiles(unreadable), str),
            list,
            "FileNotFoundError while loading scan_2.png: [Errno",
        ),
        # the one in the place of sample 0
        (
            0,
            MapDataset(FailingFiles(int), lambda index: None if index == 0 else 1 / 0),
            list,
            "ZeroDivisionError while loading scan_0.png: division by zero",
        ),
        # the data does not end
        (
            0,
            Failing(end),
            list,
            "StopIteration while loading sample 2 of Failing",
        ),
        # an error that cannot be pickled; the loader would wait for the worker
        (1, Drawing(), local_error, "Local while collating sample 0 of Drawing, sample 1 of"),
    ],
)
def test_an_error_of_a_sample_names_the_sample_and_comes_at_once(
    num_workers, dataset, collate_fn, text
):
    assert text in error_of(dataset, num_workers, collate_fn=collate_fn)


# torch may notice the closed pipe before the signal, whose handler then raises inside __del__ of its iterator
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_ends_or_hangs_is_an_error_that_names_the_worker():
    assert "DataLoader worker (pid" in error_of(Failing(lambda: os._exit(3)), timeout=10)
    assert "DataLoader timed out after 1 seconds" in error_of(Failing(hang), timeout=1)


def test_after_a_sample_that_fails_the_position_is_still_right():
    loader = make(dataset=Failing(unreadable), sampler=TrainingSampler(SIZE, shuffle=False))
    batches = iter(loader)
    with pytest.raises(RuntimeError, match="FileNotFoundError") as caught:
        next(batches)
    caught.value.__traceback__ = None
    assert loader.state_dict()["position"] == 0  # going on from here tries it again
    next(batches)
    assert loader.state_dict()["position"] == 8
