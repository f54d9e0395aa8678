"""Learning rates for another batch size than the one they were made for; other workers are in test_defaults."""

import pytest

from trainkit.config import ConfigError, get_cfg, scale_lr_to_batch
from trainkit.config.scaling import split_batch


def make_cfg(**solver):
    cfg = get_cfg()
    cfg.merge_from_other_cfg({"SOLVER": {"BASE_LR": 0.5, "BASE_LR_END": 0.1, "IMS_PER_BATCH": 32, **solver}})
    return cfg


def changes(before, after):
    return {key: value for key, value in after.SOLVER.items() if value != before.SOLVER[key]}


@pytest.mark.parametrize(("steps", "ratio"), [(1, 0.125), (4, 0.5), (16, 2.0)])
def test_the_rates_are_multiplied_by_the_ratio_of_samples_per_iteration(steps, ratio):
    cfg = make_cfg(REFERENCE_BATCH_SIZE=256, ACCUMULATION_STEPS=steps)
    scaled = scale_lr_to_batch(cfg)
    assert changes(cfg, scaled) == {
        "BASE_LR": 0.5 * ratio,
        "BASE_LR_END": 0.1 * ratio,
        "REFERENCE_BATCH_SIZE": 32 * steps,
    }
    assert cfg.SOLVER.BASE_LR == 0.5
    assert scale_lr_to_batch(scaled) is scaled


def test_the_rate_among_the_optimizers_arguments_is_scaled_too_and_a_frozen_config_stays_frozen():
    cfg = make_cfg(REFERENCE_BATCH_SIZE=64, OPTIMIZER={"NAME": "Adam", "LR": 0.25})
    cfg.freeze()
    scaled = scale_lr_to_batch(cfg)
    assert (scaled.SOLVER.OPTIMIZER.LR, scaled.is_frozen()) == (0.125, True)


def test_the_end_of_a_schedule_is_a_rate_that_is_scaled_too_and_its_length_is_none():
    schedules = [{"NAME": "Cosine", "END_VALUE": 0.25, "END": 100}, {"NAME": "Constant", "END_VALUE": None}]
    cfg = make_cfg(REFERENCE_BATCH_SIZE=64, SCHEDULES=schedules)
    assert scale_lr_to_batch(cfg).SOLVER.SCHEDULES == [
        {"NAME": "Cosine", "END_VALUE": 0.125, "END": 100},
        {"NAME": "Constant", "END_VALUE": None},
    ]
    assert cfg.SOLVER.SCHEDULES[0]["END_VALUE"] == 0.25


@pytest.mark.parametrize("reference", [0, 32])
def test_without_a_reference_or_at_the_reference_nothing_changes(reference):
    cfg = make_cfg(REFERENCE_BATCH_SIZE=reference)
    assert scale_lr_to_batch(cfg) is cfg


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
    assert changes(cfg, split).keys() <= {"IMS_PER_BATCH", "ACCUMULATION_STEPS"}
    assert split.is_frozen()


def test_ranks_that_cannot_share_the_batch_are_refused_with_the_numbers_that_can():
    message = r"number of processes: got 3 .*; accepted: 1, 2, 4, 8, which can share 8 samples per iteration"
    with pytest.raises(ConfigError, match=message):
        split_batch(make_cfg(IMS_PER_BATCH=8), 4, 3)
