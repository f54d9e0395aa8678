import itertools
from fractions import Fraction

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from tests.data.conftest import Stream
from tests.engine.tiny import Weight, sgd
from trainkit.config.config import ConfigError
from trainkit.config.defaults import get_cfg
from trainkit.data.build import (
    SAMPLER_REGISTRY,
    TRANSFORM_REGISTRY,
    build_batch_data_loader,
    build_test_loader,
    build_train_loader,
    build_transform,
)
from trainkit.data.catalog import DatasetCatalog
from trainkit.data.common import MapDataset, ToIterableDataset
from trainkit.data.loader import ResumableLoader
from trainkit.data.protocol import batches_per_epoch
from trainkit.data.samplers import InferenceSampler, TrainingSampler
from trainkit.engine.step import SimpleTrainer
from trainkit.utils import comm

# a machine with few cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Squares(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"index": index, "square": float(index * index)}


@TRANSFORM_REGISTRY.register()
def data_test_add(cfg):
    return lambda sample: {**sample, "index": sample["index"] + cfg.INPUT.ADDEND}


@TRANSFORM_REGISTRY.register()
def data_test_drop_odd(cfg):
    return lambda sample: None if sample["index"] % 2 else sample


@SAMPLER_REGISTRY.register()
def data_test_sampler(cfg, dataset):
    return TrainingSampler(len(dataset), shuffle=False, seed=cfg.SEED)


@pytest.fixture
def cfg():
    """Ten samples as ``data_ten``, five as ``data_five``, batches of four, no workers."""
    makers = {
        "data_ten": lambda: Squares(10),
        "data_five": lambda: [
            {"index": 100 + index, "label": index % 3 // 2} for index in range(5)
        ],
        "data_stream": lambda: Stream([{"index": index} for index in range(8)]),
    }
    for name, maker in makers.items():
        DatasetCatalog.register(name, maker)
    cfg = get_cfg()
    cfg.merge_from_list(
        ["SEED", 0, "MODEL.DEVICE", "cpu", "DATASETS.TRAIN", ("data_ten",), "INPUT.ADDEND", 1000]
    )
    cfg.merge_from_list(
        ["DATALOADER.NUM_WORKERS", 0, "SOLVER.IMS_PER_BATCH", 4, "TEST.IMS_PER_BATCH", 4]
    )
    yield cfg
    for name in makers:
        DatasetCatalog.remove(name)


def indices(loader, num_batches=None):
    return [batch["index"].tolist() for batch in itertools.islice(loader, num_batches)]


def test_a_batch_is_a_list_of_samples_unless_a_collate_function_says_otherwise(cfg):
    def first(**options):
        return next(
            iter(build_batch_data_loader([*range(4)], SequentialSampler(range(4)), 2, **options))
        )

    assert first() == [0, 1]
    assert first(collate_fn=sum) == 1
    loader = build_batch_data_loader([*range(5)], SequentialSampler(range(5)), 2)
    assert len(loader) == 2
    assert loader.num_workers == 0
    loaders = [
        build_batch_data_loader([0], None, 1, num_workers=1, seed=seed)
        for seed in (torch.initial_seed(), None, 6)
    ]
    assert [loader.timeout for loader in loaders] == [600] * 3
    assert len({loader.generator.initial_seed() for loader in loaders[:2]}) == 1
    assert loaders[2].generator.initial_seed() == 17288289091593111796  # as in older checkpoints
    # as with a config
    assert next(iter(build_test_loader([*range(4)], batch_size=2))).tolist() == [
        0,
        1,
    ]
    cfg.DATALOADER.COLLATE = "list"
    assert [type(sample) for sample in next(iter(build_train_loader(cfg)))] == [dict] * 4


@pytest.mark.parametrize(
    ("drop_last", "batches"), [(True, [[0, 1], [2, 3]]), (False, [[0, 1], [2, 3], [4]])]
)
def test_a_finite_loader_has_a_length_and_ends(drop_last, batches):
    samples = [*range(5)]
    sized = type("SizedStream", (Stream,), {"__len__": lambda self: len(samples)})
    every_batch = [[0, 1], [2, 3], [4]]  # of a stream no sample is left out
    for dataset, sampler, expected in (
        (sized(samples), None, every_batch),
        (samples, SequentialSampler(samples), batches),
    ):
        loader = build_batch_data_loader(dataset, sampler, 2, drop_last=drop_last)
        assert [*loader] == expected
        assert len(loader) == batches_per_epoch(loader) == len(expected)


def test_the_batch_size_is_divided_among_ranks_or_given_per_rank(as_rank):
    as_rank(0, 4)
    assert build_batch_data_loader([0], InferenceSampler(1), 12).batch_size == 3
    assert (
        build_batch_data_loader([0], InferenceSampler(1), None, single_gpu_batch_size=12).batch_size
        == 12
    )


@pytest.mark.parametrize(
    ("total", "options", "message"),
    [
        (6, {}, r"total_batch_size .* positive multiple of the world size 4, got 6"),
        (0, {}, "got 0"),
        (None, {}, "give total_batch_size or single_gpu_batch_size: None, None"),
        (4, {"single_gpu_batch_size": 1}, "single_gpu_batch_size: 4, 1"),
    ],
)
def test_a_batch_size_that_cannot_be_divided_is_an_error(total, options, message, as_rank):
    as_rank(0, 4)
    with pytest.raises(ValueError, match=message):
        build_batch_data_loader([0], InferenceSampler(1), total, **options)


def test_pinned_memory_is_not_asked_for_without_a_device_that_runs_ahead(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps")
    )
    loader = build_batch_data_loader([torch.zeros(1)], SequentialSampler([0]), 1, pin_memory=True)
    assert not loader.pin_memory
    next(iter(loader))  # no warning


@pytest.mark.parametrize(("size", "expected"), [(24, 6), (25, Fraction(25, 4))])
def test_an_endless_loader_has_epochs_by_the_size_of_its_dataset(size, expected, as_rank):
    for world_size in (1, 4):
        as_rank(0, world_size)
        loader = build_batch_data_loader(Squares(100), TrainingSampler(size, seed=0), 4)
        stream = build_batch_data_loader(
            ToIterableDataset(Squares(100), TrainingSampler(size, seed=0)), None, 4
        )
        assert batches_per_epoch(loader) == batches_per_epoch(stream) == expected
        with pytest.raises(TypeError):
            len(loader)


class ByTokens(Sampler):
    sampler, batch_size = TrainingSampler(10), None


def test_a_stream_without_a_length_and_batches_of_no_fixed_size_have_no_epochs():
    of_no_fixed_size = DataLoader([*range(10)], batch_sampler=ByTokens())
    for loader in (iter(()), build_batch_data_loader(Stream([0]), None, 1), of_no_fixed_size):
        assert batches_per_epoch(loader) is None


class Divided(IterableDataset):
    """A stream of 29 numbers that divides itself among ranks and workers; ``len()`` counts those of a rank."""

    def __init__(self, is_sized=True):
        self.rank = comm.get_data_rank()
        self.num_ranks = comm.get_data_world_size()
        self.is_sized = is_sized

    def __iter__(self):
        worker = get_worker_info()
        number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(29)[self.rank :: self.num_ranks][number::num_workers])

    def __len__(self):
        if not self.is_sized:
            raise TypeError("no length")
        return len(range(29)[self.rank :: self.num_ranks])


@pytest.mark.parametrize(
    ("world_size", "num_workers", "batches_of_ranks"),
    [  # 4 samples per batch; the shares of the workers are written beside the numbers of batches
        (1, 0, [8]),  # 29
        (1, 1, [8]),  # 29
        (1, 2, [8]),  # 15, 14: 4 + 4
        (1, 3, [9]),  # 10, 10, 9: 3 + 3 + 3
        (2, 0, [4, 4]),  # 15; 14
        (2, 2, [4, 4]),  # 8, 7: 2 + 2; 7, 7: 2 + 2
        (2, 3, [6, 5]),  # 5, 5, 5: 2 + 2 + 2; 5, 5, 4: 2 + 2 + 1
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_each_pass_of_a_divided_stream_has_every_sample_once_and_as_many_batches_as_it_says(
    world_size, num_workers, batches_of_ranks, wrapped, as_rank
):
    seen = []
    for rank in range(world_size):
        as_rank(rank, world_size)
        for is_sized in (True, False):
            stream = Divided(is_sized)
            loader = build_batch_data_loader(
                MapDataset(stream, int) if wrapped else stream,
                None,
                4 * world_size,
                drop_last=True,
                num_workers=num_workers,
            )
            batches = [*loader]
            assert len(batches) == batches_of_ranks[rank]
            assert max(len(batch) for batch in batches) == 4
            if is_sized:
                assert len(loader) == batches_per_epoch(loader) == len(batches)
        seen += itertools.chain.from_iterable(batches)
    assert sorted(seen) == [*range(29)]


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_the_epochs_of_a_stream_are_its_passes(num_workers):
    loader = build_train_loader(Divided(), total_batch_size=4, num_workers=num_workers)
    seen = []
    trainer = SimpleTrainer(
        model := Weight(lambda weight, batch: weight * batch.float().mean()), loader, sgd(model)
    )
    model.register_forward_pre_hook(lambda model, args: seen.extend(args[0].tolist()))
    length = trainer.iters_per_epoch
    for epoch in range(2):
        trainer.train(epoch * length, (epoch + 1) * length)
        assert sorted(seen) == sorted([*range(29)] * (epoch + 1))


def test_batches_that_may_not_be_short_can_still_be_had():
    loader = ResumableLoader(Divided(), batch_size=4, drop_last=True, num_workers=2)
    assert [len(batch) for batch in loader] == [4] * 6  # 15, 14: 3 + 3
    assert len(loader) == 6


def test_a_fixed_seed_gives_one_order_and_minus_one_another_each_time(cfg):
    def order(seed):
        cfg.SEED = seed
        return indices(build_train_loader(cfg, [{"index": index} for index in range(40)]), 20)

    assert order(0) == order(0)
    assert order(0) != order(4)
    assert order(-1) != order(-1)


def test_training_datasets_are_concatenated_and_transformed_and_a_transform_may_leave_samples_out(
    cfg,
):
    cfg.INPUT.TRAIN_TRANSFORM = "data_test_drop_odd"
    batches = indices(build_train_loader(cfg), 10)
    assert all(len(batch) == 4 for batch in batches)
    assert {index % 2 for batch in batches for index in batch} == {0}

    cfg.DATASETS.TRAIN = ("data_five", "data_five")
    cfg.INPUT.TRAIN_TRANSFORM = cfg.INPUT.TEST_TRANSFORM = "data_test_add"
    cfg.SOLVER.IMS_PER_BATCH = 20  # a batch may be larger than the data
    loader = build_train_loader(cfg)
    assert batches_per_epoch(loader) == Fraction(1, 2)
    assert sorted(indices(loader, 1)[0]) == sorted([*range(1100, 1105)] * 4)
    assert indices(build_test_loader(cfg, "data_five"))[0] == [1100, 1101, 1102, 1103]
    assert build_transform(get_cfg(), is_train=True) is None


def test_the_loader_options_of_the_config_reach_the_loader(cfg):
    cfg.merge_from_list(["DATALOADER.NUM_WORKERS", 1, "DATALOADER.PREFETCH_FACTOR", 5])
    cfg.merge_from_list(
        ["DATALOADER.PERSISTENT_WORKERS", True, "DATALOADER.SAMPLER_TRAIN", "data_test_sampler"]
    )
    cfg.DATALOADER.TIMEOUT = 7.0
    loader = build_train_loader(cfg)
    assert loader.num_workers == 1
    assert loader.timeout == 7
    assert loader.prefetch_factor == 5
    assert loader.persistent_workers is True
    assert indices(loader, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("DATASETS.TRAIN", (), "DATASETS.TRAIN is empty"),
        (
            "DATASETS.TRAIN",
            ("data_tne",),
            r"DATASETS.TRAIN: DatasetCatalog has no 'data_tne'; did you mean 'data_ten'",
        ),
        (
            "DATALOADER.COLLATE",
            "defualt",
            "DATALOADER.COLLATE: unknown 'defualt'; .*accepted: default, list",
        ),
        ("INPUT.TRAIN_TRANSFORM", "data_test_ad", "INPUT.TRAIN_TRANSFORM: .*data_test_add"),
    ],
)
def test_a_training_config_that_makes_no_loader_says_why(cfg, key, value, message):
    node, name = key.split(".")
    cfg[node][name] = value

    with pytest.raises(ValueError, match=message):
        build_train_loader(cfg)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine with one core
def test_testing_draws_every_sample_once_and_in_order(cfg, as_rank):
    cfg.DATALOADER.NUM_WORKERS = 2
    loader = build_test_loader(cfg, "data_ten")

    assert indices(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches_per_epoch(loader) == 3

    cfg.DATASETS.TRAIN = ("data_stream", "data_stream")  # streams are chained
    cfg.DATALOADER.NUM_WORKERS, shares = 0, []
    assert indices(build_train_loader(cfg)) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    for rank in range(3):
        as_rank(rank, 3)
        shares.append(indices(build_test_loader(cfg, "data_ten")))
    assert shares == [[[0, 1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]

    with pytest.raises(ConfigError, match="DATASETS: DatasetCatalog has no 'data_tne'"):
        build_test_loader(cfg, "data_tne")
    cfg.DATALOADER.SAMPLER_TRAIN = "RepeatFactorTrainingSampler"
    with pytest.raises(
        ConfigError, match="'RepeatFactorTrainingSampler' .* a stream has its own order"
    ):
        build_train_loader(cfg)
    cfg.DATALOADER.SAMPLER_TRAIN = "TrainingSampler"  # the default, but it was set
    with pytest.raises(ConfigError, match="'TrainingSampler' .* a stream has its own order"):
        build_train_loader(cfg)
