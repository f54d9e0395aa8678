"""The batch of an iteration, divided over another number of ranks; whole runs are in test_restarts."""

import json

import pytest
from trainkit.projects.scaling.batch import split_batch

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError, get_cfg
from trainkit.engine import DefaultTrainer


def make_cfg(**solver):
    cfg = get_cfg()
    cfg.merge_from_other_cfg({"SOLVER": solver})
    return cfg


@pytest.mark.parametrize(
    ("batch_size", "steps", "former", "present", "expected"),
    [
        (8, 1, 4, 2, (4, 2)),  # as many samples per rank and forward
        (4, 2, 2, 4, (8, 1)),
        (8, 1, 4, 1, (2, 4)),
        (12, 2, 4, 2, (6, 4)),
        (24, 1, 4, 3, (24, 1)),  # 18 would not divide 24, but 3 ranks share 24
        (4, 3, 2, 4, (4, 3)),
        (8, 1, 2, 4, (8, 1)),  # there is nothing to take a step from
        (4, 3, 1, 6, (12, 1)),  # 24 are too many for one forward, 6 ranks share 12
        (8, 3, 4, 4, (8, 3)),
    ],
)
def test_a_batch_for_other_ranks_keeps_its_size_and_that_of_a_forward_where_it_can(
    batch_size, steps, former, present, expected
):
    cfg = make_cfg(IMS_PER_BATCH=batch_size, ACCUMULATION_STEPS=steps)
    cfg.freeze()
    split = split_batch(cfg, former, present)
    solver = split.SOLVER
    found = (solver.IMS_PER_BATCH, solver.ACCUMULATION_STEPS)
    assert found == expected
    assert split.is_frozen()


def test_ranks_that_cannot_share_the_batch_are_refused_with_the_numbers_that_can():
    message = r"number of processes: got 3 .*; accepted: 1, 2, 4, 8, which can share 8 samples per iteration"
    with pytest.raises(ConfigError, match=message):
        split_batch(make_cfg(IMS_PER_BATCH=8), 4, 3)


# ---------------------------------------------------------------------- the number of ranks at the first start


def trainer_for(folder, former, *options):
    """Of one process, in the folder of a run that ``former`` processes have started with 8 samples per iteration."""
    record = {"world_size": former, "asked": [8, 1, 4]}
    (folder / "batch.json").write_text(json.dumps(record))
    return DefaultTrainer(tiny_cfg(folder, "SOLVER.REFERENCE_WORLD_SIZE", 4, *options))


def batch_of(trainer):
    solver = trainer.cfg.SOLVER
    return solver.IMS_PER_BATCH, solver.ACCUMULATION_STEPS, solver.BASE_LR, solver.MAX_ITER


@pytest.mark.parametrize(("former", "expected"), [(4, (2, 4, 0.1, 10)), (2, (2, 2, 0.05, 20)), (1, (2, 1, 0.025, 40))])
def test_other_ranks_than_at_first_change_neither_the_rates_nor_the_lengths_that_were_scaled_for_those(
    tmp_path, former, expected
):
    trainer = trainer_for(tmp_path, former)
    assert batch_of(trainer) == expected
    assert trainer.accumulation_steps == expected[1]
    assert trainer.iters_per_epoch == 40 // (expected[0] * expected[1])


def test_the_first_number_of_ranks_is_kept_until_the_command_asks_for_another_batch(tmp_path):
    trainer_for(tmp_path, 4, "SOLVER.MAX_ITER", 2, "SOLVER.STEPS", ()).train()
    assert json.loads((tmp_path / "batch.json").read_text()) == {"world_size": 4, "asked": [8, 1, 4]}
    trainer = trainer_for(tmp_path, 4, "SOLVER.IMS_PER_BATCH", 16, "SOLVER.STEPS", (), "SOLVER.MAX_ITER", 2)
    assert batch_of(trainer) == (4, 1, 0.025, 8)  # for one process, as by a new run
    trainer.train()
    assert json.loads((tmp_path / "batch.json").read_text()) == {"world_size": 1, "asked": [16, 1, 4]}
