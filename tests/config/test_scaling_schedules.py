"""The schedules of a config for another number of workers; the rest of the scaling is in test_defaults."""

import pytest

from trainkit.config import get_cfg, scale_workers
from trainkit.solver import build_schedule


def make_cfg(*entries):
    cfg = get_cfg()
    solver = {"MAX_ITER": 80, "IMS_PER_BATCH": 16, "BASE_LR": 0.5, "REFERENCE_WORLD_SIZE": 8}
    cfg.merge_from_other_cfg({"SOLVER": {**solver, "SCHEDULES": list(entries)}})
    return cfg


def test_iterations_of_schedules_are_divided_and_values_of_the_rate_multiplied():
    cfg = make_cfg(
        {"NAME": "Linear", "END": 8, "LENGTH": 8, "START_FACTOR": 0.5},
        {"NAME": "MultiStep", "BEGIN": 8, "MILESTONES": [16, "3ep"], "GAMMA": 0.5},
        {"NAME": "Cosine", "END": "2ep", "END_VALUE": 0.25, "END_RATIO": None},
        {"NAME": "WarmupStableDecay", "WARMUP": 4, "DECAY": 12, "END_VALUE": None},
        {"NAME": "UsersOwn", "PATIENCE": 8},
    )
    scaled = scale_workers(cfg, 4).SOLVER
    assert scaled.SCHEDULES == [
        {"NAME": "Linear", "END": 16, "LENGTH": 16, "START_FACTOR": 0.5},
        {"NAME": "MultiStep", "BEGIN": 16, "MILESTONES": [32, "3ep"], "GAMMA": 0.5},
        {"NAME": "Cosine", "END": "2ep", "END_VALUE": 0.125, "END_RATIO": None},
        {"NAME": "WarmupStableDecay", "WARMUP": 8, "DECAY": 24, "END_VALUE": None},
        {"NAME": "UsersOwn", "PATIENCE": 8},
    ]
    assert (cfg.SOLVER.SCHEDULES[0]["END"], scaled.MAX_ITER) == (8, 160)


def test_a_scaled_schedule_has_the_same_shape():
    cfg = make_cfg({"NAME": "Exponential", "GAMMA": 0.81}, {"NAME": "Step", "STEP_SIZE": 20, "GAMMA": 0.5})
    scaled = scale_workers(cfg, 4)
    before, after = (build_schedule(c.SOLVER.SCHEDULES, c.SOLVER.MAX_ITER, "here") for c in (cfg, scaled))
    values = [before(t, 1.0) for t in range(80)]
    assert values == pytest.approx([after(2 * t, 1.0) for t in range(80)], rel=1e-12)
    assert values != pytest.approx([after(t, 1.0) for t in range(80)], rel=1e-12)
