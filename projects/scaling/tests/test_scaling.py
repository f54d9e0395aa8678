"""Learning rates for another batch size than the one they were made for."""

import pytest

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError, get_cfg, scale_lr_to_batch, scale_workers
from trainkit.engine import DefaultTrainer


def make_cfg(**solver):
    cfg = get_cfg()
    cfg.merge_from_other_cfg(
        {"SOLVER": {"BASE_LR": 0.5, "BASE_LR_END": 0.1, "IMS_PER_BATCH": 32, **solver}}
    )
    return cfg


@pytest.mark.parametrize(("steps", "ratio"), [(1, 0.125), (16, 2.0)])
def test_the_rates_are_multiplied_by_the_ratio_of_samples_per_iteration(steps, ratio):
    cfg = make_cfg(REFERENCE_BATCH_SIZE=256, ACCUMULATION_STEPS=steps)
    scaled = scale_lr_to_batch(cfg)
    changes = {key: value for key, value in scaled.SOLVER.items() if value != cfg.SOLVER[key]}
    rates = {"BASE_LR": 0.5 * ratio, "BASE_LR_END": 0.1 * ratio}
    assert changes == {**rates, "REFERENCE_BATCH_SIZE": 32 * steps}
    assert cfg.SOLVER.BASE_LR == 0.5
    assert scale_lr_to_batch(scaled) is scaled


def test_iterations_of_schedules_are_divided_and_values_of_the_rate_multiplied():
    schedules = [
        {"NAME": "Linear", "END": 8, "LENGTH": 8, "START_FACTOR": 0.5},
        {"NAME": "MultiStep", "BEGIN": 8, "MILESTONES": [16, "3ep"], "GAMMA": 0.5},
        {"NAME": "Cosine", "END": "2ep", "END_VALUE": 0.25, "END_RATIO": None},
        {"NAME": "UsersOwn", "PATIENCE": 8},
        {"NAME": "Exponential", "GAMMA": 0.25},
    ]
    cfg = make_cfg(MAX_ITER=80, REFERENCE_WORLD_SIZE=8, SCHEDULES=schedules)
    scaled = scale_workers(cfg, 4).SOLVER
    assert scaled.SCHEDULES == [
        {"NAME": "Linear", "END": 16, "LENGTH": 16, "START_FACTOR": 0.5},
        {"NAME": "MultiStep", "BEGIN": 16, "MILESTONES": [32, "3ep"], "GAMMA": 0.5},
        {"NAME": "Cosine", "END": "2ep", "END_VALUE": 0.125, "END_RATIO": None},
        {"NAME": "UsersOwn", "PATIENCE": 8},
        {"NAME": "Exponential", "GAMMA": 0.5},
    ]
    assert cfg.SOLVER.SCHEDULES[0]["END"] == 8
    assert scaled.MAX_ITER == 160


def test_auto_scaling_changes_batch_rate_and_lengths_and_leaves_its_argument_alone(tmp_path):
    options = [
        "SOLVER.REFERENCE_WORLD_SIZE",
        8,
        "SOLVER.OPTIMIZER.LR",
        0.2,
        "SOLVER.CHECKPOINT_PERIOD",
        "2ep",
    ]
    options += ["CHECKPOINT.START", 20]
    cfg = tiny_cfg(
        tmp_path,
        "SOLVER.IMS_PER_BATCH",
        16,
        "SOLVER.MAX_ITER",
        100,
        "SOLVER.STEPS",
        (60, 80),
        *options,
    )
    cfg.freeze()
    scaled = DefaultTrainer.auto_scale_workers(cfg, 4)
    assert cfg.SOLVER.IMS_PER_BATCH == 16
    assert cfg.SOLVER.BASE_LR == 0.1
    assert cfg.SOLVER.MAX_ITER == 100
    solver = scaled.SOLVER
    assert solver.IMS_PER_BATCH == 8
    assert solver.BASE_LR == 0.05
    assert solver.MAX_ITER == 200
    assert solver.STEPS == (120, 160)
    assert solver.OPTIMIZER.LR == 0.1
    assert solver.WARMUP_ITERS == 4
    assert solver.CHECKPOINT_PERIOD == "2ep"
    assert scaled.TEST.EVAL_PERIOD == 10
    assert scaled.TEST.EVAL_START == 0
    assert scaled.CHECKPOINT.START == 40
    shorter = DefaultTrainer.auto_scale_workers(cfg, 80)
    assert shorter.TEST.EVAL_PERIOD == 1
    assert shorter.TEST.EVAL_START == 0
    assert shorter.CHECKPOINT.START == 2
    assert solver.REFERENCE_WORLD_SIZE == 4
    assert scaled.is_frozen()
    assert DefaultTrainer.auto_scale_workers(scaled, 4) is scaled

    cfg.SOLVER["REFERENCE_WORLD_SIZE"] = 3
    with pytest.raises(
        ConfigError, match="SOLVER.IMS_PER_BATCH: got 16 .*for 2 processes, a multiple of"
    ):
        DefaultTrainer.auto_scale_workers(cfg, 2)


@pytest.mark.parametrize(("settings", "warmup"), [({}, 1000), ({"WARMUP_ITERS": 1000}, 2000)])
def test_a_warm_up_is_scaled_if_it_was_set(settings, warmup):
    cfg = get_cfg()
    solver = {"REFERENCE_WORLD_SIZE": 8, "IMS_PER_BATCH": 16, **settings}
    cfg.merge_from_other_cfg({"SOLVER": solver})
    assert warmup == scale_workers(cfg, 4).SOLVER.WARMUP_ITERS
