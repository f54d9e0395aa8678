"""Epochs that end early, and runs that repeat a few batches."""

import itertools

import pytest
import torch
from trainkit.projects.samplers.config import apply

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError, check_values, scale_workers
from trainkit.data import DatasetCatalog, TrainingSampler
from trainkit.engine import DefaultTrainer, default_argument_parser
from trainkit.engine.hooks import CallbackHook


def inputs_in_order(indices):
    return torch.stack([DatasetCatalog.get("tiny_train")[index]["x"] / 2 for index in indices])


def test_an_epoch_of_some_batches_is_the_unit_of_lengths_hooks_and_orders(tmp_path):
    limit = ("SOLVER.MAX_BATCHES_PER_EPOCH", 2, "SOLVER.IMS_PER_BATCH", 4, "SOLVER.ACCUMULATION_STEPS", 2)
    cfg = tiny_cfg(tmp_path, *limit, "SOLVER.MAX_ITER", "3ep", "SOLVER.WARMUP_ITERS", 0, "TEST.EVAL_PERIOD", "1ep")
    trainer, starts = DefaultTrainer(cfg), []
    found = torch.cat([batch["x"] for batch in itertools.islice(trainer.data_loader, 12)])
    trainer.register_hooks([CallbackHook(before_epoch=lambda trainer: starts.append((trainer.iter, trainer.epoch)))])
    trainer.train()

    assert (trainer.max_iter, trainer.cfg.TEST.EVAL_PERIOD, trainer.iters_per_epoch) == (6, 2, 2)
    assert starts == [(0, 0), (2, 1), (4, 2)]
    orders = [TrainingSampler(40, seed=1).epoch_indices(epoch)[:16] for epoch in range(3)]
    assert torch.equal(found, inputs_in_order(torch.cat(orders)))


def test_a_run_repeats_the_first_batches_of_the_order_that_it_would_have(tmp_path):
    args = default_argument_parser().parse_args(["--overfit-batches", "3"])
    cfg = tiny_cfg(tmp_path)
    apply(cfg, args)
    trainer = DefaultTrainer(cfg)

    found = [batch["x"] for batch in itertools.islice(trainer.data_loader, 7)]

    first = TrainingSampler(40, seed=1).epoch_indices(0)
    assert torch.equal(torch.cat(found[:3]), inputs_in_order(first[:24]))
    assert all(torch.equal(found[i], found[i % 3]) for i in range(7))
    assert trainer.iters_per_epoch == cfg.TEST.MAX_BATCHES == 3


def test_a_limit_beyond_the_data_changes_nothing_and_another_number_of_workers_keeps_its_samples(tmp_path):
    cfg = tiny_cfg(tmp_path, "SOLVER.MAX_BATCHES_PER_EPOCH", 6, "SOLVER.REFERENCE_WORLD_SIZE", 2)
    assert DefaultTrainer(cfg).data_loader.state_dict()["kind"] == "TrainingSampler"
    assert [scale_workers(cfg, num).SOLVER.MAX_BATCHES_PER_EPOCH for num in (1, 4, 16, 64)] == [12, 3, 1, 1]


def test_limits_that_make_no_sense_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="DATALOADER.OVERFIT_BATCHES: got -1 "):
        check_values(tiny_cfg(tmp_path, "DATALOADER.OVERFIT_BATCHES", -1))
    with pytest.raises(ConfigError, match="exclude each other: both say how many"):
        check_values(tiny_cfg(tmp_path, "DATALOADER.OVERFIT_BATCHES", 1, "SOLVER.MAX_BATCHES_PER_EPOCH", 1))
