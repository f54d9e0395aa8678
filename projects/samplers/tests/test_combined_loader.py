"""Several loaders as one; epochs that end early, and runs that repeat a few batches."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader
from trainkit.projects.samplers.plugin import apply_options

from tests.data.conftest import Stream
from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError, check_values, scale_workers
from trainkit.data import (
    CombinedLoader,
    DatasetCatalog,
    RepeatFactorTrainingSampler,
    TrainingSampler,
    batches_per_epoch,
    build_batch_data_loader,
    build_train_loader,
    resume_obstacle,
)
from trainkit.engine import DefaultTrainer, default_argument_parser
from trainkit.engine.hooks import CallbackHook


class Noisy:
    def __init__(self, start, size):
        self.start, self.size = start, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.start + index + torch.rand(()).item() / 2


def combined(mode, workers=0, names="abc", **options):
    parts = {
        "a": (Noisy(0, 10), TrainingSampler(10, seed=1), 2),
        "b": (Noisy(100, 7), TrainingSampler(7, seed=2), 3),
        "c": (Noisy(200, 4), RepeatFactorTrainingSampler([1.0, 2.0, 1.5, 1.0], seed=3), 1),
    }
    loaders = {
        name: build_batch_data_loader(*parts[name], num_workers=workers, seed=5) for name in names
    }
    return CombinedLoader(loaders, mode, **options)


def take(loader, number):
    return [*itertools.islice(loader, number)]


def test_loaders_give_one_batch_in_turn_or_one_each():
    alone = {name: take(combined("each", names=name).loaders[name], 4) for name in "abc"}
    assert take(combined("each"), 4) == [{name: alone[name][i] for name in "abc"} for i in range(4)]
    assert take(combined("round_robin"), 12) == [alone[name][i] for i in range(4) for name in "abc"]


@pytest.mark.parametrize("mode", ["round_robin", "each"])
def test_a_state_continues_all_loaders_with_any_number_of_workers(mode):
    whole = take(combined(mode), 15)
    first, second = combined(mode, 2), combined(mode, 0)
    assert take(first, 7) == whole[:7]  # batches that workers have loaded ahead do not count
    second.load_state_dict(first.state_dict())
    assert take(second, 8) == whole[7:]


def test_an_epoch_is_a_pass_over_the_longest_or_the_shortest():
    lengths = {
        "max_cycle": {"each": 5, "round_robin": 15},
        "min": {"each": 7 / 3, "round_robin": 7},
    }
    for epoch, by_mode in lengths.items():
        found = {mode: float(batches_per_epoch(combined(mode, epoch=epoch))) for mode in by_mode}
        assert found == pytest.approx(by_mode)


def test_a_loader_that_ends_starts_again_and_one_without_a_length_or_a_state_is_known():
    loader = CombinedLoader({"a": [1, 2, 3], "b": "xy"}, "each")
    assert take(loader, 4) == [
        {"a": 1, "b": "x"},
        {"a": 2, "b": "y"},
        {"a": 3, "b": "x"},
        {"a": 1, "b": "y"},
    ]
    assert "the data loader (list) has no state_dict()" in resume_obstacle(loader)
    assert batches_per_epoch(CombinedLoader({"a": [1], "b": DataLoader(Stream([0]))})) is None
    assert resume_obstacle(combined("each")) == ""
    with pytest.raises(ValueError, match="the loader 'b' of a CombinedLoader yields no batch"):
        take(CombinedLoader({"a": [1], "b": []}), 2)


def test_a_state_of_other_loaders_is_named_and_the_data_start_again(caplog):
    loader, one = combined("each", names="ab"), combined("each", names="a")
    take(one, 3)
    loader.load_state_dict(one.state_dict())
    assert "data are not from the loaders ['a', 'b']; they start again" in caplog.text
    assert take(loader, 2) == take(combined("each", names="ab"), 2)


class Two(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg):
        small = cfg.clone()
        small.DATASETS.TRAIN, small.SOLVER.IMS_PER_BATCH = ("tiny_val",), 2
        return CombinedLoader(
            {"large": build_train_loader(cfg), "small": build_train_loader(small)}, "round_robin"
        )


def test_a_run_with_accumulation_has_its_length_in_epochs_and_saves_its_position(tmp_path):
    cfg = tiny_cfg(
        tmp_path, "SOLVER.ACCUMULATION_STEPS", 3, "TEST.EVAL_PERIOD", 0, "SOLVER.MAX_ITER", "2ep"
    )
    trainer = Two(cfg)
    assert trainer.max_iter == 8  # tiny_val has 12 samples, so 6 batches of 2
    trainer.train(max_iter=3)
    take(loader := Two.build_train_loader(cfg), 9)
    assert trainer.state_dict()["data"]["loaders"] == loader.state_dict()["loaders"]


def inputs_in_order(indices):
    return torch.stack([DatasetCatalog.get("tiny_train")[index]["x"] / 2 for index in indices])


def test_an_epoch_of_some_batches_is_the_unit_of_lengths_hooks_and_orders(tmp_path):
    limit = (
        "SOLVER.MAX_BATCHES_PER_EPOCH",
        2,
        "SOLVER.IMS_PER_BATCH",
        4,
        "SOLVER.ACCUMULATION_STEPS",
        2,
    )
    cfg = tiny_cfg(
        tmp_path,
        *limit,
        "SOLVER.MAX_ITER",
        "3ep",
        "SOLVER.WARMUP_ITERS",
        0,
        "TEST.EVAL_PERIOD",
        "1ep",
    )
    trainer, starts = DefaultTrainer(cfg), []
    found = torch.cat([batch["x"] for batch in itertools.islice(trainer.data_loader, 12)])
    trainer.register_hooks(
        [CallbackHook(before_epoch=lambda trainer: starts.append((trainer.iter, trainer.epoch)))]
    )
    trainer.train()
    assert trainer.max_iter == 6
    assert trainer.cfg.TEST.EVAL_PERIOD == 2
    assert trainer.iters_per_epoch == 2
    assert starts == [(0, 0), (2, 1), (4, 2)]
    orders = [TrainingSampler(40, seed=1).epoch_indices(epoch)[:16] for epoch in range(3)]
    assert torch.equal(found, inputs_in_order(torch.cat(orders)))


def test_a_run_repeats_the_first_batches_of_the_order_that_it_would_have(tmp_path):
    args = default_argument_parser().parse_args(["--overfit-batches", "3"])
    cfg = tiny_cfg(tmp_path)
    apply_options(cfg, args)
    trainer = DefaultTrainer(cfg)
    found = [batch["x"] for batch in itertools.islice(trainer.data_loader, 7)]
    first = TrainingSampler(40, seed=1).epoch_indices(0)
    assert torch.equal(torch.cat(found[:3]), inputs_in_order(first[:24]))
    assert all(torch.equal(found[i], found[i % 3]) for i in range(7))
    assert trainer.iters_per_epoch == cfg.TEST.MAX_BATCHES == 3


def test_a_limit_beyond_the_data_changes_nothing_and_another_number_of_workers_keeps_its_samples(
    tmp_path,
):
    cfg = tiny_cfg(tmp_path, "SOLVER.MAX_BATCHES_PER_EPOCH", 6, "SOLVER.REFERENCE_WORLD_SIZE", 2)
    assert DefaultTrainer(cfg).data_loader.state_dict()["kind"] == "TrainingSampler"
    assert scale_workers(cfg, 1).SOLVER.MAX_BATCHES_PER_EPOCH == 12
    assert scale_workers(cfg, 4).SOLVER.MAX_BATCHES_PER_EPOCH == 3
    assert scale_workers(cfg, 16).SOLVER.MAX_BATCHES_PER_EPOCH == 1
    assert scale_workers(cfg, 64).SOLVER.MAX_BATCHES_PER_EPOCH == 1


def test_limits_that_make_no_sense_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="DATALOADER.OVERFIT_BATCHES: got -1 "):
        check_values(tiny_cfg(tmp_path, "DATALOADER.OVERFIT_BATCHES", -1))
    with pytest.raises(ConfigError, match="exclude each other: both say how many"):
        check_values(
            tiny_cfg(tmp_path, "DATALOADER.OVERFIT_BATCHES", 1, "SOLVER.MAX_BATCHES_PER_EPOCH", 1)
        )
