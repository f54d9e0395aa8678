import logging
import math

import pytest
import torch
from torch import nn

from trainkit.config import ConfigError, get_cfg
from trainkit.solver import LRMultiplier, build_lr_scheduler, build_optimizer


def make_cfg(name="WarmupMultiStepLR", optimizer=None, **solver):
    cfg = get_cfg()
    solver = {"MAX_ITER": 10, "STEPS": (), "WARMUP_ITERS": 0, "BASE_LR": 1.0, "LR_SCHEDULER_NAME": name, **solver}
    cfg.merge_from_other_cfg({"SOLVER": {**solver, "OPTIMIZER": optimizer or {}}})
    return cfg


def lrs_of(cfg, num_steps=10):
    """The learning rate in use at each iteration, and the one after the last step."""
    optimizer = build_optimizer(cfg, nn.Linear(1, 1))
    scheduler = build_lr_scheduler(cfg, optimizer)
    lrs = [optimizer.param_groups[0]["lr"]]
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        lrs.append(optimizer.param_groups[0]["lr"])
    return lrs


def build(cfg):
    return build_lr_scheduler(cfg, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))


def test_a_multi_step_schedule_gives_these_values():
    cfg = make_cfg(STEPS=(4, 8), GAMMA=0.5, WARMUP_ITERS=2, WARMUP_FACTOR=0.5)
    assert lrs_of(cfg) == [0.5, 0.75, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_a_constant_warmup_gives_these_values():
    cfg = make_cfg(STEPS=(4,), GAMMA=0.5, WARMUP_ITERS=2, WARMUP_FACTOR=0.5, WARMUP_METHOD="constant")
    assert lrs_of(cfg, 5) == [0.5, 0.5, 1.0, 1.0, 0.5, 0.5]


def test_an_exponential_warmup_gives_these_values():
    cfg = make_cfg(STEPS=(4,), GAMMA=0.5, WARMUP_ITERS=2, WARMUP_FACTOR=0.25, WARMUP_METHOD="exponential")
    assert lrs_of(cfg, 5) == [0.25, 0.5, 1.0, 1.0, 0.5, 0.5]


def test_a_schedule_without_steps_is_flat():
    assert lrs_of(make_cfg(), 12) == [1.0] * 13


def test_a_fixed_gamma_schedule_gives_these_values():
    cfg = make_cfg("WarmupStepWithFixedGammaLR", GAMMA=0.5, NUM_DECAYS=1, WARMUP_ITERS=2, WARMUP_FACTOR=0.0)
    assert lrs_of(cfg) == [0.0, 0.5] + [1.0] * 3 + [0.5] * 6


def test_a_cosine_schedule_gives_these_values():
    cfg = make_cfg("WarmupCosineLR", WARMUP_ITERS=2, WARMUP_FACTOR=0.0, BASE_LR=2.0, BASE_LR_END=0.5)
    cosine = [2.0 * (0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi * iter / 10))) for iter in range(11)]
    assert lrs_of(cfg) == pytest.approx([0.0, cosine[2] / 2, *cosine[2:]])


@pytest.mark.parametrize(("base_lr", "end"), [(0.1, 0.003), (0.3, 0.0), (0.7, 0.7)])
def test_a_cosine_schedule_ends_exactly_at_its_end_value(base_lr, end):
    cfg = make_cfg("WarmupCosineLR", WARMUP_ITERS=3, BASE_LR=base_lr, BASE_LR_END=end)
    assert lrs_of(cfg)[-1] == base_lr * (end / base_lr)


def test_the_cosine_starts_from_the_lr_that_the_optimizer_node_sets():
    cfg = make_cfg("WarmupCosineLR", optimizer={"LR": 0.5}, BASE_LR=1.0, BASE_LR_END=0.25)
    assert lrs_of(cfg)[::10] == [0.5, 0.25]


def test_a_rescaled_schedule_gives_these_values():
    cfg = make_cfg("WarmupCosineLR", WARMUP_ITERS=5, WARMUP_FACTOR=0.0, RESCALE_INTERVAL=True)
    cosine = [0.5 * (1 + math.cos(math.pi * iter / 5)) for iter in range(6)]
    assert lrs_of(cfg) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, *cosine])


@pytest.mark.parametrize("name", ["WarmupMultiStepLR", "WarmupCosineLR", "WarmupStepWithFixedGammaLR"])
@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("warmup_iters", [0, 4])
def test_every_schedule_keeps_its_last_value_past_the_end(name, rescale, warmup_iters):
    cfg = make_cfg(name, STEPS=(5,), WARMUP_ITERS=warmup_iters, RESCALE_INTERVAL=rescale, BASE_LR_END=0.01)
    lrs = lrs_of(cfg, 15)
    last = {"WarmupMultiStepLR": 0.1, "WarmupCosineLR": 0.01, "WarmupStepWithFixedGammaLR": 0.001}[name]
    assert lrs[10:] == pytest.approx([last] * 6)
    assert len(set(lrs[10:])) == 1
    assert lrs[9] == pytest.approx(last) or name == "WarmupCosineLR"


def test_a_warmup_as_long_as_the_training_ends_at_the_schedule():
    assert lrs_of(make_cfg(MAX_ITER=4, WARMUP_ITERS=4, WARMUP_FACTOR=0.0), 5) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_result_is_a_multiplier_that_counts_iterations():
    cfg = make_cfg(MAX_ITER=12)
    optimizer = build_optimizer(cfg, nn.Linear(1, 1))
    scheduler = build_lr_scheduler(cfg, optimizer)
    for _ in range(12):
        optimizer.step()
        scheduler.step()
    assert isinstance(scheduler, LRMultiplier)
    assert scheduler.state_dict() == {"base_lrs": [1.0], "last_epoch": 12, "factors": []}


def test_groups_keep_their_own_base_lr():
    cfg = make_cfg(STEPS=(1,), BIAS_LR_FACTOR=4.0)
    optimizer = build_optimizer(cfg, nn.Linear(1, 1))
    scheduler = build_lr_scheduler(cfg, optimizer)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.4]


def test_steps_that_are_never_reached_are_dropped_with_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        lrs = lrs_of(make_cfg(STEPS=(5, 10, 30)))
    assert lrs == [1.0] * 5 + [0.1] * 6
    assert [record.getMessage() for record in caplog.records] == [
        "SOLVER.STEPS (10, 30) are dropped: the training ends before them, at 10"
    ]


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        ({"name": "WarmupCosinLR"}, r"LR_SCHEDULER_NAME: unknown 'WarmupCosinLR'; did you mean 'WarmupCosineLR'\? "),
        ({"name": "cosine"}, "accepted: WarmupCosineLR, WarmupMultiStepLR, WarmupStepWithFixedGammaLR"),
        ({"WARMUP_ITERS": 11}, "SOLVER.WARMUP_ITERS=11 is longer than SOLVER.MAX_ITER=10; shorten the warm-up"),
        ({"WARMUP_ITERS": -1}, "SOLVER.WARMUP_ITERS must be in iterations, an int >= 0, got -1"),
        ({"MAX_ITER": 0}, "SOLVER.MAX_ITER must be in iterations, an int >= 1, got 0"),
        ({"MAX_ITER": "3ep"}, "SOLVER.MAX_ITER .* got '3ep'; trainkit.config.resolve_lengths turns epochs"),
        ({"STEPS": ("1ep",)}, "SOLVER.STEPS .* got '1ep'"),
        ({"STEPS": (0,)}, "SOLVER.STEPS .* an int >= 1, got 0"),
        ({"STEPS": (6, 5)}, r"SOLVER.STEPS must grow from one to the next, got \(6, 5\)"),
        ({"STEPS": (5, 5)}, "SOLVER.STEPS must grow"),
        ({"WARMUP_METHOD": "exp"}, "SOLVER.WARMUP_METHOD.*linear, constant or exponential, got 'exp'"),
        ({"name": "WarmupStepWithFixedGammaLR", "NUM_DECAYS": 0}, "SOLVER.NUM_DECAYS must be >= 1, got 0"),
        ({"name": "WarmupCosineLR", "BASE_LR_END": 2.0}, "BASE_LR_END=2.0 must be between 0 and SOLVER.BASE_LR=1.0"),
        ({"name": "WarmupCosineLR", "BASE_LR": 0.0}, "SOLVER.BASE_LR=0.0, which must not be 0"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_an_error_that_names_its_key(solver, message):
    with pytest.raises(ConfigError, match=message):
        build(make_cfg(**solver))
