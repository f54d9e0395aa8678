import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

from trainkit.config.config import ConfigError
from trainkit.config.defaults import get_cfg
from trainkit.data.build import (
    SAMPLER_REGISTRY,
    TRANSFORM_REGISTRY,
    build_batch_data_loader,
    build_test_loader,
    build_train_loader,
    build_transform,
    trivial_batch_collator,
    worker_init_reset_seed,
)
from trainkit.data.catalog import DatasetCatalog
from trainkit.data.common import ToIterableDataset
from trainkit.data.protocol import iters_per_epoch
from trainkit.data.samplers import (
    InferenceSampler,
    TrainingSampler,
)
from trainkit.utils.periods import exact

one_core_may_be_all = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Squares(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"index": index, "square": float(index * index)}


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class SizedStream(Stream):
    def __len__(self):
        return len(self.samples)


class RandomNumbers(Dataset):
    """What the three global generators of a worker draw."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return random.random(), float(np.random.random()), torch.rand(()).item()


@TRANSFORM_REGISTRY.register()
def data_test_add(cfg):
    return lambda sample: {**sample, "index": sample["index"] + cfg.INPUT.ADDEND}


@TRANSFORM_REGISTRY.register()
def data_test_drop_odd(cfg):
    return lambda sample: None if sample["index"] % 2 else sample


@TRANSFORM_REGISTRY.register()
def data_test_broken(cfg):
    return "not callable"


@pytest.fixture
def cfg():
    """Ten samples as ``data_ten``, five as ``data_five``, batches of four, no workers."""
    makers = {
        "data_ten": lambda: Squares(10),
        "data_five": lambda: [{"index": 100 + index, "label": index % 3 // 2} for index in range(5)],
        "data_empty": list,
        "data_number": lambda: 7,
        "data_stream": lambda: Stream([{"index": index} for index in range(8)]),
    }
    for name, maker in makers.items():
        DatasetCatalog.register(name, maker)
    cfg = get_cfg()
    cfg.SEED = 0
    cfg.MODEL.DEVICE = "cpu"
    cfg.DATASETS.TRAIN = ("data_ten",)
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.SOLVER.IMS_PER_BATCH = 4
    cfg.TEST.IMS_PER_BATCH = 4
    cfg.INPUT.ADDEND = 1000
    yield cfg
    for name in makers:
        DatasetCatalog.remove(name)


def indices(loader, num_batches=None):
    return [batch["index"].tolist() for batch in itertools.islice(loader, num_batches)]


# ---------------------------------------------------------------------------- build_batch_data_loader


@one_core_may_be_all
def test_workers_draw_random_numbers_by_seed_and_rank(as_rank):
    def drawn(rank, seed):
        as_rank(rank, 2)
        loader = build_batch_data_loader(RandomNumbers(), SequentialSampler(range(4)), 8, num_workers=1, seed=seed)
        return [number for sample in next(iter(loader)) for number in sample]

    first = drawn(rank=0, seed=1)

    assert drawn(rank=0, seed=1) == first
    assert not {*first} & {*drawn(rank=0, seed=2)}
    assert not {*first} & {*drawn(rank=1, seed=1)}


def test_each_worker_is_seeded_from_the_seed_of_its_loader():
    def drawn(loader_seed, worker_id):
        torch.manual_seed(loader_seed)
        worker_init_reset_seed(worker_id)
        return random.random(), np.random.random(), torch.rand(()).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        first, again = drawn(5, 0), drawn(5, 0)
        others = drawn(5, 1), drawn(2**63, 0)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

    assert first == again
    assert all(a != b for other in others for a, b in zip(first, other, strict=True))


def test_a_batch_is_a_list_of_samples_unless_a_collate_function_says_otherwise():
    make = lambda **options: next(  # noqa: E731
        iter(build_batch_data_loader([*range(4)], SequentialSampler(range(4)), 2, **options))
    )
    assert make() == [0, 1]
    assert make(collate_fn=sum) == 1
    assert next(iter(build_test_loader([*range(4)], batch_size=2))).tolist() == [0, 1]  # as with a config
    assert trivial_batch_collator([1, 2]) == [1, 2]


@pytest.mark.parametrize(("drop_last", "batches"), [(True, [[0, 1], [2, 3]]), (False, [[0, 1], [2, 3], [4]])])
@pytest.mark.parametrize("iterable", [True, False])
def test_a_finite_loader_has_a_length_and_ends(drop_last, batches, iterable):
    samples = [*range(5)]
    dataset, sampler = (SizedStream(samples), None) if iterable else (samples, SequentialSampler(samples))
    loader = build_batch_data_loader(dataset, sampler, 2, drop_last=drop_last)

    assert [*loader] == batches
    assert len(loader) == iters_per_epoch(loader) == len(batches)


def test_the_batch_size_is_divided_among_ranks_or_given_per_rank(as_rank):
    as_rank(0, 4)
    assert build_batch_data_loader([0], InferenceSampler(1), 12).batch_size == 3
    assert build_batch_data_loader([0], InferenceSampler(1), None, single_gpu_batch_size=12).batch_size == 12


@pytest.mark.parametrize(
    ("total", "options", "message"),
    [
        (6, {}, r"total_batch_size .* multiple of the world size 4, got 6"),
        (0, {}, r"total_batch_size .* positive multiple of the world size 4, got 0"),
        (None, {}, "either total_batch_size or single_gpu_batch_size, got None and None"),
        (4, {"single_gpu_batch_size": 1}, "got 4 and 1"),
    ],
)
def test_a_batch_size_or_seed_that_does_not_fit_is_refused(as_rank, total, options, message):
    as_rank(0, 4)
    with pytest.raises(ValueError, match=message):
        build_batch_data_loader([0], InferenceSampler(1), total, **options)


@pytest.mark.parametrize("found", [None, torch.device("mps")])
def test_pinned_memory_is_not_asked_for_without_a_device_that_runs_ahead(monkeypatch, found):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    loader = build_batch_data_loader([torch.zeros(1)], SequentialSampler([0]), 1, pin_memory=True)
    assert not loader.pin_memory
    next(iter(loader))  # no warning


# ---------------------------------------------------------------------------- iters_per_epoch


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (lambda: TrainingSampler(24, seed=0), 6),
        (lambda: TrainingSampler(25, seed=0), Fraction(25, 4)),
        (lambda: TrainingSampler(3, seed=0), Fraction(3, 4)),
    ],
)
def test_an_endless_loader_has_epochs_by_the_size_of_its_dataset(sampler, expected, as_rank):
    for world_size in (1, 2, 4):
        as_rank(0, world_size)
        loader = build_batch_data_loader(Squares(100), sampler(), 4)
        stream = build_batch_data_loader(ToIterableDataset(Squares(100), sampler()), None, 4)
        assert exact(iters_per_epoch(loader)) == exact(iters_per_epoch(stream)) == expected


def test_batches_of_no_fixed_size_have_no_epochs():
    class ByTokens(Sampler):
        sampler, batch_size = TrainingSampler(10), None

    assert iters_per_epoch(DataLoader([*range(10)], batch_sampler=ByTokens())) is None


@pytest.mark.parametrize(
    "loader",
    [
        lambda: (batch for batch in ()),
        lambda: itertools.repeat(0),
        lambda: build_batch_data_loader(Stream([0]), None, 1),
    ],
)
def test_a_stream_without_a_length_has_no_epochs(loader):
    assert iters_per_epoch(loader()) is None


# ---------------------------------------------------------------------------- build_train_loader


def test_a_fixed_seed_gives_one_order_and_minus_one_another_each_time(cfg):
    samples = [{"index": index, "label": index % 7 == 0} for index in range(40)]

    def order(seed):
        cfg.SEED = seed
        return indices(build_train_loader(cfg, samples), 20)

    assert order(3) == order(3)
    assert order(3) != order(4)
    assert order(-1) != order(-1)


def test_training_datasets_are_concatenated_and_transformed(cfg):
    cfg.DATASETS.TRAIN = ("data_five", "data_five")
    cfg.INPUT.TRAIN_TRANSFORM = "data_test_add"
    cfg.SOLVER.IMS_PER_BATCH = 10

    loader = build_train_loader(cfg)

    assert iters_per_epoch(loader) == 1
    for batch in itertools.islice(loader, 2):
        assert sorted(batch["index"].tolist()) == sorted([*range(1100, 1105)] * 2)


def test_a_training_transform_may_leave_samples_out(cfg):
    cfg.INPUT.TRAIN_TRANSFORM = "data_test_drop_odd"
    batches = indices(build_train_loader(cfg), 10)
    assert all(len(batch) == 4 for batch in batches)
    assert {index % 2 for batch in batches for index in batch} == {0}


def test_a_batch_may_be_larger_than_the_training_data(cfg):
    cfg.DATASETS.TRAIN = ("data_five",)
    cfg.SOLVER.IMS_PER_BATCH = 12

    loader = build_train_loader(cfg)

    assert [len(batch) for batch in indices(loader, 3)] == [12, 12, 12]
    assert exact(iters_per_epoch(loader)) == Fraction(5, 12)


def test_an_iterable_dataset_keeps_its_own_order_and_end(cfg):
    cfg.DATASETS.TRAIN = ("data_stream", "data_stream")
    loader = build_train_loader(cfg)

    assert indices(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    assert iters_per_epoch(loader) is None


def test_collating_can_be_left_to_the_model(cfg):
    cfg.DATALOADER.COLLATE = "list"
    batch = next(iter(build_train_loader(cfg)))
    assert isinstance(batch, list)
    assert [*batch[0]] == ["index", "square"]


def test_the_loader_options_of_the_config_reach_the_loader(cfg):
    cfg.DATALOADER.NUM_WORKERS = 1
    cfg.DATALOADER.PREFETCH_FACTOR = 5
    cfg.DATALOADER.PERSISTENT_WORKERS = True

    loader = build_train_loader(cfg)

    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 5, True)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("DATASETS.TRAIN", (), "DATASETS.TRAIN is empty"),
        ("DATASETS.TRAIN", ("data_tne",), r"DATASETS.TRAIN: DatasetCatalog has no 'data_tne'; did you mean 'data_ten'"),
        ("DATASETS.TRAIN", ("data_empty",), "DATASETS.TRAIN: 'data_empty' has no samples"),
        (
            "DATALOADER.SAMPLER_TRAIN",
            "TrainSampler",
            "no 'TrainSampler' .* did you mean 'TrainingSampler'",
        ),
        ("DATALOADER.COLLATE", "defualt", "DATALOADER.COLLATE: unknown 'defualt'; .*accepted: default, list"),
        ("INPUT.TRAIN_TRANSFORM", "data_test_ad", "INPUT.TRAIN_TRANSFORM: .*data_test_add"),
        ("SOLVER.IMS_PER_BATCH", 0, "SOLVER.IMS_PER_BATCH .* got 0"),
    ],
)
def test_a_training_config_that_makes_no_loader_says_why(cfg, key, value, message):
    node, name = key.split(".")
    cfg[node][name] = value

    with pytest.raises(ValueError, match=message) as error:
        build_train_loader(cfg)
    assert key == "SOLVER.IMS_PER_BATCH" or isinstance(error.value, ConfigError)


@SAMPLER_REGISTRY.register()
def data_test_sampler(cfg, dataset):
    return TrainingSampler(len(dataset), shuffle=False, seed=cfg.SEED)


def test_a_config_names_a_registered_sampler(cfg):
    cfg.DATALOADER.SAMPLER_TRAIN = "data_test_sampler"
    assert indices(build_train_loader(cfg), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


# ---------------------------------------------------------------------------- build_test_loader


@one_core_may_be_all
@pytest.mark.parametrize("num_workers", [0, 2])
def test_testing_draws_every_sample_once_and_in_order(cfg, num_workers):
    cfg.DATALOADER.NUM_WORKERS = num_workers
    loader = build_test_loader(cfg, "data_ten")

    assert indices(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert iters_per_epoch(loader) == 3


def test_testing_divides_the_samples_among_ranks_with_a_batch_size_per_rank(cfg, as_rank):
    shares = []
    for rank in range(3):
        as_rank(rank, 3)
        shares.append(indices(build_test_loader(cfg, "data_ten")))
    assert shares == [[[0, 1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]


def test_testing_uses_the_test_transform_and_lets_it_leave_nothing_out(cfg):
    cfg.INPUT.TRAIN_TRANSFORM = "data_test_drop_odd"
    cfg.INPUT.TEST_TRANSFORM = "data_test_add"
    assert indices(build_test_loader(cfg, "data_five"))[0] == [1100, 1101, 1102, 1103]

    cfg.INPUT.TEST_TRANSFORM = "data_test_drop_odd"
    with pytest.raises(ValueError, match=r"INPUT.TEST_TRANSFORM gave None"):
        indices(build_test_loader(cfg, "data_five"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("data_tne", "DATASETS: DatasetCatalog has no 'data_tne'"), ("data_empty", "'data_empty' has no samples")],
)
def test_a_dataset_that_cannot_be_tested_says_why(cfg, name, message):
    with pytest.raises(ConfigError, match=message):
        build_test_loader(cfg, name)


# ---------------------------------------------------------------------------- transforms


def test_no_name_is_no_transform_and_a_broken_one_says_what_it_built(cfg):
    assert build_transform(cfg, is_train=True) is None
    assert build_transform(cfg, is_train=False) is None
    cfg.INPUT.TEST_TRANSFORM = "data_test_broken"
    with pytest.raises(TypeError, match=r"INPUT.TEST_TRANSFORM must build a function .* got a str"):
        build_transform(cfg, is_train=False)
