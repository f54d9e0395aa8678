import functools
import gc
import io
import itertools
import logging
import multiprocessing.util
import pickle
import random
import re
import sys
import traceback
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    default_collate,
    get_worker_info,
)

from trainkit.data import (
    InferenceSampler,
    MapDataset,
    ResumableLoader,
    ToIterableDataset,
    TrainingSampler,
    build_batch_data_loader,
    resume_obstacle,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine with few cores

SIZE = 11


class Drawing(Dataset):
    """Each sample is its index and one number of each global generator."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, random.random(), float(np.random.random()), torch.rand(()).item()


class Together(Drawing):
    """Reads a whole batch before it draws."""

    def __getitems__(self, indices):
        found = [*indices]
        return [self[index] for index in found]


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


class Stream(IterableDataset):
    """A user's stream, with a state."""

    def __init__(self):
        self.count = 0

    def __iter__(self):
        while True:
            self.count += 1
            yield self.count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Stateless(IterableDataset):
    def __iter__(self):
        return iter(range(100))


ORDERS = {
    "training": lambda seed: {"sampler": TrainingSampler(SIZE, seed=seed)},
    "own": lambda seed: {"sampler": Counting()},
}


def make(order="training", num_workers=0, *, seed=3, dataset=None, **options):
    arguments = ORDERS[order](seed)
    if "sampler" in arguments:
        arguments["batch_size"] = 4
    options.setdefault("collate_fn", list)
    dataset = Drawing() if dataset is None else dataset
    generator = torch.Generator()
    return ResumableLoader(dataset, seed=seed, num_workers=num_workers, generator=generator, **arguments, **options)


def endless(loader):
    while True:
        yield from loader


def take(loader, num_batches):
    return [*itertools.islice(endless(loader), num_batches)]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def columns(batches):
    return [*zip(*(sample for batch in batches for sample in batch), strict=True)]


# ---------------------------------------------------------------------------- the place in the data


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"num_workers": 0}, {"num_workers": 2}),
        ({"num_workers": 2, "prefetch_factor": 3}, {"num_workers": 0}),
        ({"num_workers": 1, "persistent_workers": True}, {"num_workers": 3, "prefetch_factor": 1}),
    ],
)
def test_a_resumed_loader_delivers_what_the_uninterrupted_one_would_have(order, before, after):
    uninterrupted = take(make(order), 12)

    interrupted = make(order, **before)
    batches = endless(interrupted)
    delivered = [next(batches) for _ in range(5)]
    state = through_a_file(interrupted.state_dict())
    resumed = make(order, seed=4, **after)
    resumed.load_state_dict(state)

    assert delivered == uninterrupted[:5]
    assert take(resumed, 7) == uninterrupted[5:]


@pytest.mark.parametrize("order", ORDERS)
def test_without_its_state_a_loader_delivers_something_else(order):
    uninterrupted = take(make(order), 12)

    assert take(make(order), 7) != uninterrupted[5:]
    assert take(make(order, seed=4), 12) != uninterrupted


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "persistent_workers": True}])
def test_a_place_can_be_asked_for_and_loaded_at_any_time(order, options):
    reference = take(make(order), 8)
    loader = make(order, **options)
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
        if place == 2:
            assert loader.state_dict() == make_state(order, 5)


def make_state(order, num_batches):
    loader = make(order)
    batches = endless(loader)
    for _ in range(num_batches):
        next(batches)
    return loader.state_dict()


def test_a_state_counts_the_samples_of_all_ranks(as_rank):
    as_rank(1, 3)
    loader = make()
    take(loader, 5)

    assert loader.state_dict() == {
        "kind": "TrainingSampler",
        "seed": 3,
        "position": 60,
        "order": {"seed": 3, "position": 60},
    }


@pytest.mark.parametrize("order", ["training"])
def test_another_number_of_ranks_goes_on_with_the_same_global_batches(order, as_rank):
    def loaders(world_size):
        for rank in range(world_size):
            as_rank(rank, world_size)
            yield ResumableLoader(Drawing(), batch_size=12 // world_size, collate_fn=list, **ORDERS[order](3))

    def global_batches(loaders, num_batches):
        shares = zip(*(take(loader, num_batches) for loader in loaders), strict=True)
        return [sorted(itertools.chain.from_iterable(of_all_ranks)) for of_all_ranks in shares]

    expected = global_batches(loaders(1), 6)
    before = [*loaders(3)]
    assert global_batches(before, 2) == expected[:2]
    after = [*loaders(2)]
    for loader in after:
        loader.load_state_dict(before[0].state_dict())

    assert global_batches(after, 4) == expected[2:]


@pytest.mark.parametrize("position", [40, 40_000_000])
@pytest.mark.parametrize("sampler_class", [TrainingSampler])
def test_going_on_costs_the_same_everywhere(position, sampler_class):
    class Recording(sampler_class):
        def epoch_indices(self, epoch):
            epochs.append(epoch)
            return super().epoch_indices(epoch)

        def locate(self, position):
            positions.append(position)
            return super().locate(position)

    epochs, positions = [], []
    size_or_factors = SIZE if sampler_class is TrainingSampler else [1.0] * SIZE
    loader = ResumableLoader(Drawing(), batch_size=4, sampler=Recording(size_or_factors, seed=3))
    order = {"seed": 3, "position": position, "epoch": position // SIZE, "offset": position % SIZE}
    loader.load_state_dict({"kind": "Recording", "seed": 3, "position": position, "order": order})

    next(iter(loader))

    assert positions == [position]
    assert epochs == [position // SIZE]


def test_the_seeds_of_the_checkpoint_win_and_are_logged(caplog):
    first = make("training", seed=5)
    expected = take(first, 4)[2:]
    state = make("training", seed=5)
    batches = iter(state)
    next(batches), next(batches)

    resumed = make("training", seed=6)
    with caplog.at_level(logging.INFO, logger="trainkit.data"):
        resumed.load_state_dict(state.state_dict())

    assert take(resumed, 2) == expected
    assert [record.getMessage() for record in caplog.records] == [
        "The data continues in the order of the checkpoint's seed 5, not of 6"
    ]


def error_of_next(batches):
    try:
        next(batches)
    except OSError as error:
        error.__traceback__ = None  # it holds the iterator in a cycle, and torch then takes 10 s to end the workers
        return str(error)


def test_behind_a_sample_that_fails_the_place_is_still_right():
    class Failing(Drawing):
        def __getitem__(self, index):
            if index == bad:
                raise OSError("unreadable")
            return super().__getitem__(index)

    bad = [*itertools.islice(TrainingSampler(SIZE, seed=3), 5)][4]  # in the second batch
    for num_workers in (0, 2):
        loader = make(num_workers=num_workers, dataset=Failing())
        batches = iter(loader)
        next(batches)
        assert "unreadable" in error_of_next(batches)
        assert loader.state_dict()["position"] == 4  # going on from here tries it again
        next(batches)
        assert loader.state_dict()["position"] == 12


class Unreadable(Drawing):
    def __getitem__(self, index):
        if index == 2:
            raise FileNotFoundError(2, "no such image")
        return super().__getitem__(index)


class UnreadableTogether(Unreadable):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class UnreadableFiles(Unreadable):
    def sample_name(self, index):
        return f"scan_{index}.png"


def not_together(batch):
    raise ValueError("these do not fit together")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({}, "while loading sample 2 of Unreadable"),
        ({"num_workers": 1}, "while loading sample 2 of Unreadable"),
        ({"dataset": MapDataset(Unreadable(), str)}, "while loading sample 2 of Unreadable"),
        ({"dataset": ConcatDataset([[0], Unreadable()])}, "while loading sample 2 of Unreadable"),
        ({"dataset": Subset(Unreadable(), [5, 2])}, "while loading sample 2 of Unreadable"),
        ({"dataset": ConcatDataset([[0], [0]])}, "while loading sample 2 of ConcatDataset"),
        ({"sampler": InferenceSampler(SIZE)}, "while loading sample 2 of Unreadable"),
        ({"dataset": MapDataset(UnreadableFiles(), str)}, "while loading scan_2.png"),
        (
            {"dataset": UnreadableTogether(), "sampler": InferenceSampler(SIZE), "batch_size": 3},
            "while loading " + ", ".join(f"sample {index} of UnreadableTogether" for index in range(3)),
        ),
        (
            {"dataset": Drawing(), "collate_fn": not_together, "batch_size": 7},
            "while making a batch of " + ", ".join(f"sample {index} of Drawing" for index in range(5)) + " and 2 more",
        ),
    ],
)
def test_an_error_of_a_sample_names_the_sample_and_keeps_its_type(options, note):
    order = {"sampler": TrainingSampler(SIZE, shuffle=False), "batch_size": 4, "collate_fn": list}
    with pytest.raises((FileNotFoundError, IndexError, ValueError)) as caught:
        next(iter(ResumableLoader(**{"dataset": Unreadable(), **order, **options})))
    caught.value.__traceback__ = None  # as above
    assert "".join(traceback.format_exception(caught.value)).rstrip().endswith(f"\n{note}")


def test_a_loader_that_cannot_be_resumed_loads_what_a_plain_one_does():
    found = []
    for loader_class in (ResumableLoader, DataLoader, DataLoader):
        torch.manual_seed(6 if len(found) < 2 else 7)
        batches = loader_class(Drawing(), batch_size=4, shuffle=True, collate_fn=list)
        found.append([[(index, drawn) for batch in batches for index, _, _, drawn in batch], torch.rand(()).item()])
    assert found[0] == found[1] != found[2]


class OwnBatches:
    def __iter__(self):
        yield from ((index for index in part) for part in ([3, 1], [0]))


def look_at_dataset(worker_id):
    dataset = get_worker_info().dataset
    dataset.seen = [type(dataset).__name__, dataset[0]]


class Looked(list):
    def __getitem__(self, index):
        return [*self.seen, index] if hasattr(self, "seen") else list.__getitem__(self, index)


def test_a_loader_that_cannot_be_resumed_is_a_plain_one_for_its_batches_and_its_workers():
    assert [*ResumableLoader([5, 6, 7, 8], batch_sampler=OwnBatches(), collate_fn=list)] == [[8, 6], [5]]

    loader = ResumableLoader(Looked([5, 6]), num_workers=1, collate_fn=list, worker_init_fn=look_at_dataset)
    assert [*loader] == [[["Looked", 5, 0]], [["Looked", 5, 1]]]


def test_a_dataset_that_leads_to_what_holds_the_iterator_is_let_go():
    class Owner:
        def collate(self, samples):
            return samples

    owner = Owner()
    owner.iterator = iter(ResumableLoader([1, 2], sampler=TrainingSampler(2), collate_fn=owner.collate))
    next(owner.iterator)
    reference = weakref.ref(owner)

    del owner
    gc.collect()
    assert reference() is None


def test_an_older_iterator_does_not_move_the_place_of_the_newer():
    loader = make()
    older, newer = iter(loader), iter(loader)
    next(newer)
    next(older), next(older)

    assert loader.state_dict()["position"] == 4


def test_every_iteration_of_an_endless_sampler_begins_at_the_same_place():
    loader = make()
    loader.load_state_dict(make_state("training", 2))
    assert take(loader, 3) == take(loader, 3)


# ---------------------------------------------------------------------------- streams


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_sampled_stream_takes_part_like_its_sampler(num_workers):
    def loader(num_workers):
        stream = ToIterableDataset(Drawing(), TrainingSampler(SIZE, seed=3))
        return build_batch_data_loader(stream, None, 4, num_workers=num_workers)

    expected = take(make(), 8)
    before = loader(num_workers)
    batches = iter(before)
    assert [next(batches) for _ in range(3)] == expected[:3]
    after = loader(2 - num_workers)
    after.load_state_dict(through_a_file(before.state_dict()))

    assert take(after, 5) == expected[3:]


def test_a_sampled_stream_over_a_sampler_without_a_state_is_a_plain_one():
    loader = ResumableLoader(ToIterableDataset([5, 6, 7], SequentialSampler([0, 1, 2])), batch_size=2, collate_fn=list)
    assert "SequentialSampler has no state_dict" in resume_obstacle(loader)
    assert [*loader] == [[5, 6], [7]]


@pytest.mark.parametrize("wrap", [lambda stream: stream, lambda stream: MapDataset(stream, keep_even)])
def test_a_stream_with_a_state_takes_part_without_workers(wrap):
    def loader():
        return build_batch_data_loader(wrap(Stream()), None, 3)

    expected = take(loader(), 6)
    before = loader()
    batches = iter(before)
    next(batches), next(batches)
    after = loader()
    after.load_state_dict(through_a_file(before.state_dict()))

    assert after.state_dict() == before.state_dict()
    assert take(after, 4) == expected[2:]


def keep_even(sample):
    return None if sample % 2 else sample


# ---------------------------------------------------------------------------- who cannot be resumed


@pytest.mark.parametrize(
    ("make_loader", "reason"),
    [
        (lambda: [1, 2], r"the data loader \(list\) has no state_dict"),
        (lambda: DataLoader([1, 2]), r"the data loader \(DataLoader\) has no state_dict"),
        (lambda: make("training", in_order=False), "in_order=False"),
        (lambda: ResumableLoader([1], batch_size=None), "batch_size=None"),
        (lambda: ResumableLoader([1, 2], shuffle=True), "RandomSampler has no state_dict.* sampler of trainkit.data"),
        (lambda: build_batch_data_loader([1], InferenceSampler(1), 1), "InferenceSampler has no state_dict"),
        (lambda: build_batch_data_loader(Stateless(), None, 1), "Stateless has no state_dict.* map-style"),
        (lambda: build_batch_data_loader(Stream(), None, 1, num_workers=2), "each of the 2 workers reads its own copy"),
        (
            lambda: build_batch_data_loader(
                ToIterableDataset([1], TrainingSampler(1), shard_sampler=False), None, 1, num_workers=2
            ),
            "each of the 2 workers reads its own copy",
        ),
        (
            lambda: build_batch_data_loader(MapDataset(ToIterableDataset([1], TrainingSampler(1)), str), None, 1),
            "has no state_dict.* map-style",
        ),
    ],
)
def test_a_loader_that_cannot_be_resumed_says_why(make_loader, reason):
    loader = make_loader()

    assert re.search(reason, resume_obstacle(loader))
    if isinstance(loader, ResumableLoader):
        with pytest.raises(TypeError, match=reason):
            loader.state_dict()
        with pytest.raises(TypeError, match=reason):
            loader.load_state_dict({})


@pytest.mark.parametrize("order", ORDERS)
def test_a_loader_that_can_be_resumed_has_no_obstacle(order):
    class Wrapper:
        def __init__(self, loader):
            self.loader = loader

        def __getattr__(self, name):
            return getattr(self.loader, name)

    assert resume_obstacle(make(order)) == resume_obstacle(Wrapper(make(order))) == ""
    assert "RandomSampler" in resume_obstacle(Wrapper(ResumableLoader([1], shuffle=True)))


# ---------------------------------------------------------------------------- random augmentation


@pytest.mark.parametrize("order", ORDERS)
def test_random_augmentation_does_not_depend_on_the_workers(order):
    without = take(make(order), 6)

    for column in columns(without)[1:]:
        assert len({*column}) == len(column)
    for options in ({"num_workers": 1}, {"num_workers": 3, "prefetch_factor": 1, "persistent_workers": True}):
        assert take(make(order, **options), 6) == without


def test_a_plain_loader_draws_by_worker():  # so that the comparisons above can fail
    def draw(num_workers):
        options = {"generator": torch.Generator().manual_seed(1), "collate_fn": list}
        sampler = TrainingSampler(SIZE, seed=3)
        return take(DataLoader(Drawing(), sampler=sampler, batch_size=4, num_workers=num_workers, **options), 6)

    one, two = columns(draw(1)), columns(draw(2))
    assert one[0] == two[0]
    assert one[1] != two[1]


def test_random_augmentation_depends_on_the_position_in_the_stream_of_all_ranks(as_rank):
    stream = [sample for batch in take(make(), 6) for sample in batch]
    for rank in range(3):
        as_rank(rank, 3)
        share = [sample for batch in take(make(), 2) for sample in batch]
        assert share == stream[rank::3]


def test_random_augmentation_depends_on_the_seed():
    def draw(seed):
        sampler = TrainingSampler(SIZE, shuffle=False, seed=seed)
        return columns(take(build_batch_data_loader(Drawing(), sampler, 4), 3))

    assert draw(3) == draw(3)
    assert draw(3)[0] == draw(4)[0]
    for of_one_seed, of_another in zip(draw(3)[1:], draw(4)[1:], strict=True):
        assert not {*of_one_seed} & {*of_another}


def test_random_augmentation_does_not_depend_on_how_much_earlier_samples_drew():
    class Greedy(Drawing):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            random.random(), np.random.randn(), torch.rand(index)
            return sample

    assert take(make(dataset=Greedy()), 5) == take(make(), 5)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "dataset",
    [
        Together(),
        Subset(Drawing(), range(SIZE)),
        Subset(Together(), range(SIZE)),
        ConcatDataset([Subset(Drawing(), range(5)), Subset(Drawing(), range(5, SIZE))]),
        MapDataset(Drawing(), tuple),
    ],
)
def test_datasets_of_all_kinds_draw_by_position(dataset, num_workers):
    assert take(make(num_workers=num_workers, dataset=dataset), 5) == take(make(), 5)


def test_a_dataset_of_several_draws_for_all_of_them():
    samples = [sample for batch in take(make(dataset=StackDataset(Drawing(), Drawing())), 2) for sample in batch]
    assert [first for first, _ in samples] == [sample for batch in take(make(), 2) for sample in batch]
    assert all(first[1:] != second[1:] for first, second in samples)


def test_a_sample_in_the_place_of_a_rejected_one_draws_by_the_same_position():
    def dataset():
        return MapDataset(Drawing(), lambda sample: None if sample[0] % 2 else sample)

    assert take(make(dataset=dataset()), 6) == take(make(num_workers=2, dataset=dataset()), 6)


def states():
    return random.getstate(), np.random.get_state()[1:], torch.get_rng_state()


@pytest.mark.parametrize("num_normals", [0, 1])  # NumPy's normal numbers come in pairs, the second one waits
def test_loading_without_workers_leaves_the_global_random_state_alone(num_normals):
    def collate(samples):
        return samples, random.random(), np.random.randn(), torch.rand(())

    np.random.randn(num_normals)
    before = states()
    take(make(collate_fn=collate), 3)
    with pytest.raises(ZeroDivisionError):
        take(make(collate_fn=lambda samples: 1 // 0), 1)
    after = states()

    assert after[0] == before[0]
    assert after[1][0].tolist() == before[1][0].tolist()
    assert after[1][1:] == before[1][1:]
    assert torch.equal(after[2], before[2])


def test_collating_draws_by_position_as_well():
    def collate(samples):
        return random.random(), np.random.random(), torch.rand(()).item()

    assert take(make(collate_fn=collate), 4) == take(make(collate_fn=collate, num_workers=2), 4)


def test_what_cannot_draw_is_not_seeded(monkeypatch):
    def refuse(number):
        raise AssertionError("was seeded")

    monkeypatch.setattr("trainkit.data.loader.seed_globals", refuse)
    tensors = torch.utils.data.TensorDataset(torch.arange(SIZE))
    for dataset in ([*range(SIZE)], tensors, Subset(tensors, range(SIZE)), ConcatDataset([tensors, [0]])):
        take(make(dataset=dataset, collate_fn=default_collate), 2)
        with pytest.raises(AssertionError, match="was seeded"):
            take(make(dataset=dataset, collate_fn=list), 1)
    with pytest.raises(AssertionError, match="was seeded"):
        take(make(dataset=ConcatDataset([tensors, Drawing()]), collate_fn=default_collate), 1)


# ---------------------------------------------------------------------------- still a DataLoader


def test_it_looks_like_the_data_loader_that_was_asked_for():
    dataset, sampler = Drawing(), Counting()
    loader = ResumableLoader(dataset, sampler=sampler, batch_size=4, drop_last=True, collate_fn=list)

    assert isinstance(loader, DataLoader)
    assert loader.dataset is dataset
    assert loader.sampler is loader.batch_sampler.sampler is sampler
    assert (loader.batch_size, loader.drop_last, loader.collate_fn) == (4, True, list)


class Opened(Dataset):
    file = None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.file


def open_file(worker_id):
    dataset = get_worker_info().dataset
    assert isinstance(dataset, Opened)
    dataset.file = f"{type(dataset.file).__name__} {len(dataset)} in {worker_id}"


@pytest.mark.slow
def test_a_worker_init_function_of_the_user_configures_the_dataset_also_in_a_spawned_worker():
    loader = build_batch_data_loader(
        Opened(),
        TrainingSampler(8, seed=0),
        2,
        num_workers=1,
        worker_init_fn=open_file,
        multiprocessing_context="spawn",
    )
    assert next(iter(loader)) == ["NoneType 8 in 0"] * 2


def test_a_loader_can_be_pickled_before_it_is_iterated():
    loader = ResumableLoader(Opened(), sampler=TrainingSampler(8, seed=0), batch_size=2)
    assert pickle.loads(pickle.dumps(loader)).state_dict() == loader.state_dict()


def _tell_at_the_end(folder, worker_id):
    multiprocessing.util.Finalize(None, (folder / str(worker_id)).touch, exitpriority=0)


def test_the_workers_of_a_loader_in_a_cycle_are_told_to_end(tmp_path):
    loader = build_batch_data_loader(
        list(range(8)),
        TrainingSampler(8, seed=0),
        2,
        num_workers=2,
        worker_init_fn=functools.partial(_tell_at_the_end, tmp_path),
    )
    cycle = {"deliveries": iter(loader)}
    cycle["itself"] = cycle
    next(cycle["deliveries"])

    del loader, cycle
    gc.collect()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


# ---------------------------------------------------------------------------- a sample that seems to end the data


class Ending(Dataset):
    """Reading one sample raises what would end a loop over the data, or the process that reads them."""

    def __init__(self, error=StopIteration, bad=2):
        self.error, self.bad = error, bad

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if index == self.bad:
            raise self.error
        return index


def collate_badly(samples):
    return next(iter(()))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": Ending()}, r"StopIteration while loading sample 2 of Ending"),
        ({"dataset": Ending(SystemExit(3))}, r"SystemExit\(3,\) while loading sample 2 of Ending"),
        ({"dataset": MapDataset(Ending(), str)}, r"StopIteration while loading sample 2 of Ending"),
        (
            {"dataset": Drawing(), "collate_fn": collate_badly, "batch_size": 2},
            r"StopIteration while making a batch of sample 0 of Drawing, sample 1 of Drawing",
        ),
        (
            {"dataset": ToIterableDataset(Ending(), InferenceSampler(SIZE)), "sampler": None},
            r"StopIteration while loading sample 2 of Ending",
        ),
    ],
)
def test_a_sample_that_seems_to_end_the_data_or_its_worker_is_an_error_that_names_it(num_workers, options, message):
    order = {"sampler": TrainingSampler(SIZE, shuffle=False), "batch_size": 4, "collate_fn": list}
    with pytest.raises(RuntimeError, match=message) as caught:
        [*itertools.islice(ResumableLoader(**{**order, **options}, num_workers=num_workers), 4)]
    caught.value.__traceback__ = None  # as above


def test_a_mapped_stream_does_not_end_where_its_function_raises_stop_iteration():
    with pytest.raises(RuntimeError, match="StopIteration"):
        [*MapDataset(Stream(), collate_badly)]


# ---------------------------------------------------------------------------- passes of kept workers


def test_each_pass_of_an_evaluation_draws_the_same_whether_workers_are_kept_or_not():
    def make(**options):
        return ResumableLoader(
            Drawing(), sampler=InferenceSampler(SIZE), batch_size=4, num_workers=2, collate_fn=list, seed=3, **options
        )

    kept = make(persistent_workers=True)
    passes = [[*kept], [*itertools.islice(kept, 1)], [*kept], [*make()]]
    assert passes[0] == passes[2] == passes[3]
    assert passes[1] == passes[0][:1]
    assert len({sample[1] for batch in passes[0] for sample in batch}) == SIZE
