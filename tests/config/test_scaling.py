"""Learning rates for another batch size than the one they were made for; other workers are in test_defaults."""

import pytest

from trainkit.config import get_cfg, scale_lr_to_batch


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
