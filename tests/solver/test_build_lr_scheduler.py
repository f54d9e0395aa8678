import logging

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

from trainkit.config import ConfigError, check_values, get_cfg
from trainkit.solver import (
    LR_SCHEDULER_BUILDER_REGISTRY,
    LRMultiplier,
    build_lr_scheduler,
    build_optimizer,
)


def make_cfg(name="WarmupMultiStepLR", optimizer=None, **solver):
    cfg = get_cfg()
    solver = {
        "MAX_ITER": 10,
        "STEPS": (),
        "WARMUP_ITERS": 0,
        "BASE_LR": 1.0,
        "LR_SCHEDULER_NAME": name,
        **solver,
    }
    cfg.merge_from_other_cfg({"SOLVER": {**solver, "OPTIMIZER": optimizer or {}}})
    return cfg


def lrs_of(cfg, num_steps=10):
    """The learning rate in use at each iteration, and the one after the last step."""
    optimizer = build_optimizer(cfg, nn.Linear(1, 1))
    scheduler = build_lr_scheduler(cfg, optimizer)
    assert isinstance(scheduler, LRMultiplier)
    lrs = [optimizer.param_groups[0]["lr"]]
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        lrs.append(optimizer.param_groups[0]["lr"])
    return lrs


def cosine_of_torch(lr, end, num_steps):
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = CosineAnnealingLR(optimizer, num_steps, eta_min=end)
    rates = scheduler.get_last_lr()
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
    return rates


COSINE = cosine_of_torch(2.0, 0.5, 10)
HALF = cosine_of_torch(1.0, 0.0, 5)
STEPS = {"STEPS": (4, 8), "GAMMA": 0.5, "WARMUP_ITERS": 2}
FLAT = {"GAMMA": 0.5, "NUM_DECAYS": 1, "WARMUP_ITERS": 2, "WARMUP_FACTOR": 0.0}


@pytest.mark.parametrize(
    ("name", "solver", "expected"),
    [
        ("WarmupMultiStepLR", {}, [1.0] * 11),
        (
            "WarmupMultiStepLR",
            {**STEPS, "WARMUP_FACTOR": 0.5},
            [0.5, 0.75, 1, 1, 0.5, 0.5, 0.5, 0.5, *[0.25] * 3],
        ),
        (
            "WarmupMultiStepLR",
            {"WARMUP_ITERS": 10, "WARMUP_FACTOR": 0.0},
            [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0],
        ),
        (
            "WarmupMultiStepLR",
            {"MAX_ITER": 1, "WARMUP_ITERS": 1, "WARMUP_FACTOR": 0.5},
            [0.5, *[1.0] * 10],
        ),
        ("WarmupStepWithFixedGammaLR", FLAT, [0.0, 0.5, *[1.0] * 3, *[0.5] * 6]),
        (
            "WarmupCosineLR",
            {"WARMUP_ITERS": 2, "WARMUP_FACTOR": 0.0, "BASE_LR": 2.0, "BASE_LR_END": 0.5},
            [0.0, COSINE[2] / 2, *COSINE[2:]],
        ),
        (
            "WarmupCosineLR",
            {"WARMUP_ITERS": 5, "WARMUP_FACTOR": 0.0, "RESCALE_INTERVAL": True},
            [0.0, 0.2, 0.4, 0.6, 0.8, *HALF],
        ),
    ],
    ids=str,
)
def test_a_named_schedule_gives_these_values(name, solver, expected):
    assert lrs_of(make_cfg(name, **solver)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("base_lr", "end"),
    [
        (0.1, 0.003),
        (0.7, 0.7),
    ],
)
def test_a_cosine_goes_exactly_from_the_rate_of_the_optimizer_to_its_end(base_lr, end):
    cfg = make_cfg("WarmupCosineLR", optimizer={"LR": base_lr}, BASE_LR=9.0, BASE_LR_END=end)
    assert lrs_of(cfg)[::10] == [base_lr, end]


def test_steps_that_are_never_reached_are_dropped_with_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert lrs_of(make_cfg(STEPS=(5, 10, 30))) == [1.0] * 5 + [0.1] * 6
    [text] = caplog.messages
    assert text.startswith("SOLVER.STEPS are (5, 10, 30)")
    assert text.endswith(" after 10 iterations")


def test_the_log_says_the_first_rate_and_the_one_after_the_warm_up(caplog):
    cfg = get_cfg()  # WARMUP_ITERS is not set, so it is at most 5 % of the run
    cfg.merge_from_other_cfg({"SOLVER": {"MAX_ITER": 100, "BASE_LR": 1.0}})
    with caplog.at_level(logging.INFO):
        rates = lrs_of(cfg)
    assert rates[0] == 0.001
    assert rates[5:] == [1.0] * 6
    [text] = [text for text in caplog.messages if text.startswith("The learning rate is")]
    assert "0.001 at the start" in text
    assert "1 after 5 iterations" in text


def test_a_config_may_name_a_function_that_makes_the_schedule():
    @LR_SCHEDULER_BUILDER_REGISTRY.register()
    def test_exponential(cfg, optimizer):
        return ExponentialLR(optimizer, cfg.SOLVER.GAMMA)

    cfg = make_cfg(LR_SCHEDULER_BUILDER="test_exponential")
    assert type(build_lr_scheduler(cfg, build_optimizer(cfg, nn.Linear(1, 1)))) is ExponentialLR


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        (
            {"name": "WarmupCosinLR"},
            r"LR_SCHEDULER_NAME: unknown 'WarmupCosinLR'; did you mean 'WarmupCosineLR'\? ",
        ),
        ({"LR_SCHEDULER_BUILDER": "mine"}, "LR_SCHEDULER_BUILDER: no 'mine'"),
        ({"WARMUP_ITERS": 11}, "SOLVER.WARMUP_ITERS: got 11 .*at most SOLVER.MAX_ITER, 10"),
        ({"MAX_ITER": "3ep"}, "SOLVER.MAX_ITER.* got .'3ep'"),
        (
            {"WARMUP_METHOD": "exp", "WARMUP_ITERS": 2},
            "WarmupMultiStepLR, .*: warmup_method.*got 'exp'",
        ),
        (
            {"name": "WarmupCosineLR", "BASE_LR_END": 2.0},
            "SOLVER.BASE_LR_END: got 2.0 .*from 0 to SOLVER.BASE_LR, 1.0",
        ),
        ({"name": "WarmupCosineLR", "BASE_LR": 0.0}, "SOLVER.BASE_LR, 0.0, which must not be 0"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_an_error_that_names_its_key(solver, message):
    optimizer = build_optimizer(make_cfg(), nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=message):
        build_lr_scheduler(make_cfg(**solver), optimizer)


@pytest.mark.parametrize(("warmup", "at_500"), [(999, 0.5005005), (1000, 0.5), (1001, 0.4995005)])
def test_a_warm_up_that_was_set_has_its_length_also_that_of_the_default(warmup, at_500):
    cfg = make_cfg(MAX_ITER=4000, WARMUP_ITERS=warmup, WARMUP_FACTOR=0.0)
    rates = lrs_of(cfg, warmup)
    assert rates[500] == pytest.approx(at_500, abs=1e-7)
    assert rates[warmup - 1] < 1
    assert rates[warmup] == 1.0


def test_a_warm_up_that_was_set_and_is_longer_than_the_run_is_an_error_also_that_of_the_default():
    with pytest.raises(ConfigError, match="SOLVER.WARMUP_ITERS: got 1000 .*at most .* 500"):
        check_values(make_cfg(MAX_ITER=500, WARMUP_ITERS=1000))


@pytest.mark.parametrize("settings", [{}, {"WARMUP_ITERS": 1000}, {"WARMUP_ITERS": 50}], ids=str)
def test_a_run_from_its_own_config_file_has_the_same_rates(tmp_path, settings):
    cfg, again = get_cfg(), get_cfg()
    cfg.merge_from_other_cfg({"SOLVER": {"MAX_ITER": 2000, **settings}})
    (tmp_path / "config.yaml").write_text(cfg.dump())
    again.merge_from_file(tmp_path / "config.yaml")
    rates = lrs_of(again, 1500)
    assert rates == lrs_of(cfg, 1500)
    # the first iteration with the whole rate: 5 % of 2000 unless it was set
    assert rates.index(0.001) == settings.get("WARMUP_ITERS", 100)


@pytest.mark.parametrize(("settings", "num_warnings"), [({}, 0), ({"STEPS": (30000,)}, 1)])
def test_steps_beyond_the_end_are_warned_about_if_they_were_set(settings, num_warnings, caplog):
    cfg = get_cfg()
    cfg.merge_from_other_cfg({"SOLVER": {"MAX_ITER": 100, **settings}})
    with caplog.at_level(logging.WARNING):
        lrs_of(cfg)
    assert caplog.text.count("SOLVER.STEPS are (30000,)") == num_warnings


def never_reached(caplog):
    return [text for text in caplog.messages if text.startswith("The learning rate never reaches")]


@pytest.mark.parametrize(
    ("solver", "largest", "at"),
    [
        # (1 + cos(0.6 pi)) / 2 and (1 + cos(0.8 pi)) / 2; the last one falls from 0.001 to 0
        ({"LR_SCHEDULER_NAME": "WarmupCosineLR", "WARMUP_ITERS": 60}, 0.3454915, 60),
        ({"LR_SCHEDULER_NAME": "WarmupCosineLR", "WARMUP_ITERS": 80}, 0.0954915, 80),
        ({"LR_SCHEDULER_NAME": "WarmupCosineLR", "WARMUP_ITERS": 100}, 0.001, 0),
        ({"LR_SCHEDULER_NAME": "WarmupLinearLR", "WARMUP_ITERS": 25}, 0.75, 25),
        ({"WARMUP_ITERS": 60, "STEPS": (30, 50)}, 0.01, 60),
        ({"WARMUP_ITERS": 60, "STEPS": (30,), "WARMUP_FACTOR": 0.5}, 0.5, 0),
        (
            {
                "LR_SCHEDULER_NAME": "WarmupStepWithFixedGammaLR",
                "WARMUP_ITERS": 60,
                "NUM_DECAYS": 1,
            },
            0.1,
            60,
        ),
    ],
    ids=str,
)
def test_a_warm_up_that_never_reaches_the_rate_is_a_warning_with_the_largest_rate(
    solver, largest, at, caplog
):
    rates = lrs_of(make_cfg(**{"MAX_ITER": 100, "BASE_LR": 0.2, **solver}), 99)
    assert max(rates) == pytest.approx(0.2 * largest, rel=1e-5)
    assert rates.index(max(rates)) == at
    [text] = never_reached(caplog)
    assert f"reaches 0.2: the largest is {max(rates):.3g}, after {at} iterations" in text
    assert "SOLVER.RESCALE_INTERVAL True" in text


@pytest.mark.parametrize(
    "solver",
    [
        {"LR_SCHEDULER_NAME": "WarmupCosineLR", "WARMUP_ITERS": 60, "RESCALE_INTERVAL": True},
        {"LR_SCHEDULER_NAME": "WarmupLinearLR", "WARMUP_ITERS": 60, "RESCALE_INTERVAL": True},
        {"LR_SCHEDULER_NAME": "WarmupCosineLR", "WARMUP_ITERS": 5},
        {"WARMUP_ITERS": 60, "STEPS": (70,)},
        {"WARMUP_ITERS": 60, "STEPS": (30,), "WARMUP_FACTOR": 1.0},
        {"BASE_LR": 0.0},
    ],
    ids=str,
)
def test_a_warm_up_that_reaches_the_rate_within_a_hundredth_is_no_warning(solver, caplog):
    build_lr_scheduler(
        cfg := make_cfg(MAX_ITER=100, **solver), build_optimizer(cfg, nn.Linear(1, 1))
    )
    assert never_reached(caplog) == []


def test_a_linear_decay_by_name_is_a_line_to_its_end():
    line = [0.5, 0.46, 0.42, 0.38, 0.34, 0.3, 0.26, 0.22, 0.18, 0.14, 0.1]
    cfg = make_cfg("WarmupLinearLR", BASE_LR=0.5, BASE_LR_END=0.1)
    assert lrs_of(cfg) == pytest.approx(line)
    assert lrs_of(make_cfg("WarmupLinearLR"))[10] == 0.0


def test_a_linear_decay_after_the_warm_up_is_that_of_hugging_face():
    """The rates of transformers' get_linear_schedule_with_warmup, which are 0 in iterations 0 and 20."""
    warm_up = [0.0, 0.075, 0.15, 0.225]
    decay = numpy.linspace(0.3, 0.0, 17)[:16]
    options = {"WARMUP_ITERS": 4, "WARMUP_FACTOR": 0.0, "RESCALE_INTERVAL": True}
    cfg = make_cfg("WarmupLinearLR", MAX_ITER=20, BASE_LR=0.3, **options)
    assert lrs_of(cfg, 19) == pytest.approx([*warm_up, *decay])
