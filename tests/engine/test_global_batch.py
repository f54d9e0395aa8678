"""The batch of an iteration, divided over another number of ranks; whole runs are in test_world_sizes."""

import pytest

from trainkit.config import ConfigError, get_cfg
from trainkit.engine.global_batch import split_batch


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
