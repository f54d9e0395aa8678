"""Schedules: their values against torch, against OpenMMLab's closed forms, and by hand, and in lists of a config."""

import inspect
import logging
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from trainkit.projects.solver_extras.schedules import (
    Chain,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    ExponentialWarmup,
    InverseSquareRoot,
    Linear,
    MultiStep,
    OneCycle,
    PiecewiseLinear,
    Polynomial,
    Segment,
    Step,
)

from trainkit.config import ConfigError, get_cfg, resolve_lengths
from trainkit.solver import SCHEDULE_REGISTRY, LRMultiplier, build_lr_scheduler, build_schedule


def values_by_torch(make, base, count, closed=False):
    """Step by step, or by the closed form, which torch uses for ``step(epoch)``."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=base, momentum=0.9)
    scheduler = make(optimizer)
    values = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # step(epoch) is deprecated
        for t in range(count):
            if closed:
                scheduler.step(t)
            elif t:
                optimizer.step()
                scheduler.step()
            values.append(optimizer.param_groups[0]["lr"])
    return values


def values_of(schedule, base, count):
    return [schedule(t, base) for t in range(count)]


def equal_restarts(optimizer, period):
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, period, 1, eta_min=1e-5)


def one_cycle(optimizer, steps, **options):
    return lr_scheduler.OneCycleLR(
        optimizer, optimizer.param_groups[0]["lr"], total_steps=steps, **options
    )


def three_phases(optimizer, steps):
    return one_cycle(optimizer, steps, pct_start=0.45, three_phase=True)


def linear_phases(optimizer, steps):
    options = {"pct_start": 0.25, "three_phase": True, "anneal_strategy": "linear"}
    return one_cycle(optimizer, steps, div_factor=7.0, final_div_factor=30.0, **options)


# name: ours, a number that gives torch's, and one that gives another of torch, a little different
LIKE_TORCH = {
    "constant": (
        Constant(7, 0.3),
        lambda o, n: lr_scheduler.ConstantLR(o, 0.3, total_iters=n),
        6,
        7,
    ),
    "linear": (
        Linear(8, 0.3, 0.9),
        lambda o, n: lr_scheduler.LinearLR(o, 0.3, 0.9, total_iters=n),
        7,
        8,
    ),
    "step": (Step(3, 0.7), lambda o, n: lr_scheduler.StepLR(o, n, 0.7), 3, 4),
    "multi-step": (
        MultiStep([2, 5, 5, 9], 0.7),
        lambda o, n: lr_scheduler.MultiStepLR(o, [n, 2, 9, 5], 0.7),
        5,
        4,
    ),
    "exponential": (Exponential(0.7), lr_scheduler.ExponentialLR, 0.7, 0.71),
    "cosine": (
        Cosine(9, end_value=1e-5),
        lambda o, n: lr_scheduler.CosineAnnealingLR(o, n, 1e-5),
        9,
        8,
    ),
    "polynomial": (Polynomial(8, 0.9), lambda o, n: lr_scheduler.PolynomialLR(o, n, 0.9), 7, 8),
    "restarts": (
        CosineRestarts([4, 8, 16]),
        lambda o, n: lr_scheduler.CosineAnnealingWarmRestarts(o, n, 2),
        4,
        5,
    ),
    "equal restarts": (CosineRestarts([5, 5, 5], end_value=1e-5), equal_restarts, 5, 4),
    "one cycle": (OneCycle(15), one_cycle, 15, 16),
    "three phases": (OneCycle(19, pct_start=0.45, three_phase=True), three_phases, 19, 20),
    "linear phases": (
        OneCycle(15, 0.25, "linear", 7.0, 30.0, three_phase=True),
        linear_phases,
        15,
        16,
    ),
}


@pytest.mark.parametrize("name", LIKE_TORCH)
def test_a_schedule_equals_torchs_closed_form_bit_by_bit_and_its_steps_nearly(name):
    ours, make, same, other = LIKE_TORCH[name]
    for base in (1.0, 7e-4):
        values = values_of(ours, base, 15)
        assert values == values_by_torch(lambda o: make(o, same), base, 15, closed=True)
        assert values != values_by_torch(lambda o: make(o, other), base, 15, closed=True)
        # to the end of the shortest cosine, where the recursion divides by 0
        stepped = values_by_torch(lambda o: make(o, same), base, 10)
        assert values[:10] == pytest.approx(stepped, rel=1e-12, abs=1e-12 * base)


def test_cosine_restarts_begin_at_their_weights_and_keep_the_last_value():
    schedule, root = CosineRestarts([2, 4], [1.0, 0.5], end_ratio=0.25), math.sqrt(0.5)
    expected = [4.0, 2.5, 2.0, 1.5 + 0.5 * root, 1.5, 1.5 - 0.5 * root]
    assert values_of(schedule, 4.0, 9) == pytest.approx([*expected, *expected[-1:] * 3], rel=1e-14)
    assert OneCycle(19)(25, 4.0) == OneCycle(19)(18, 4.0)


def test_an_exponential_warmup_is_the_factor_to_the_share_that_is_left():
    assert values_of(ExponentialWarmup(5, 0.0625), 1.0, 7) == [
        0.0625,
        0.125,
        0.25,
        0.5,
        1.0,
        1.0,
        1.0,
    ]
    assert [make(9)(0, 3.0) for make in (Constant, Linear, ExponentialWarmup)] == pytest.approx(
        [1.0] * 3
    )


def test_an_inverse_square_root_continues_a_warmup_of_its_timescale():
    schedule = Chain(
        [Segment(Linear(101, 0.0), 0, 101), Segment(InverseSquareRoot(100), 100, 10_000)]
    )
    vaswani = [min(t**-0.5, t * 100**-1.5) for t in range(1, 900)]
    assert [schedule(t, 0.1) for t in range(1, 900)] == pytest.approx(vaswani, rel=1e-12)


def test_a_schedule_by_points_is_the_interpolation_of_numpy():
    points = ([2, 5, 11], [0.25, 1.0, 0.0])
    values = values_of(PiecewiseLinear(*points), 0.3, 15)
    assert values == pytest.approx(0.3 * np.interp(range(15), *points), rel=1e-12, abs=1e-12)
    entry = {"NAME": "PiecewiseLinear", "MILESTONES": ["1ep", "3ep"], "FACTORS": [0.5, 1.0]}
    cfg = resolve_lengths(make_cfg(entry), 2)
    assert lrs_of(cfg, 8) == [0.5, 0.5, 0.5, 0.625, 0.75, 0.875, 1.0, 1.0]
    held = resolve_lengths(make_cfg({**entry, "STEP_SIZE": "1ep"}, MAX_ITER="5ep"), 2)
    assert lrs_of(held, 10) == [0.5] * 4 + [0.75] * 2 + [1.0] * 4


@pytest.mark.parametrize(
    ("milestones", "factors"), [([5, 2], [1, 2]), ([2, 2], [1, 2]), ([], []), ([1, 2], [1])]
)
def test_points_that_are_no_function_are_an_error(milestones, factors):
    with pytest.raises(ValueError, match="milestones"):
        PiecewiseLinear(milestones, factors)


@pytest.mark.parametrize(
    ("entries", "largest"),
    [
        # the largest t / 60 * (1 + cos(pi * t / 100)) / 2 of whole t
        ([{"NAME": "Linear", "START_FACTOR": 0.0, "END": 61}, {"NAME": "Cosine"}], 0.43704),
        ([{"NAME": "Linear", "END_FACTOR": 0.5}], 0.5),
        ([{"NAME": "Constant", "FACTOR": 0.1, "END": 200}], 0.1),
    ],
    ids=str,
)
def test_entries_that_never_reach_the_rate_are_a_warning_with_the_largest_rate(
    entries, largest, caplog
):
    rates = lrs_of(make_cfg(*entries, MAX_ITER=100), 100)
    assert max(rates) == pytest.approx(largest, abs=1e-4)
    [text] = [text for text in caplog.messages if "never reaches" in text]
    assert f"reaches 1: the largest is {max(rates):.3g}, " in text


def test_entries_in_a_row_reach_the_rate_and_are_no_warning(caplog):
    warmup = {"NAME": "Linear", "START_FACTOR": 0.0, "END": 61}
    for rest in ({"NAME": "Cosine", "BEGIN": 60}, {"NAME": "OneCycle", "BEGIN": 60}):
        build(make_cfg(warmup, rest, MAX_ITER=100))
    build(make_cfg({"NAME": "OneCycle"}, MAX_ITER=1_000_003))
    assert [text for text in caplog.messages if "never reaches" in text] == []


def test_segments_continue_each_other_and_keep_their_last_value():
    schedule = Chain([Segment(Linear(5, 0.0), 0, 5), Segment(Polynomial(5, end_ratio=0.5), 6, 11)])
    assert values_of(schedule, 4.0, 13) == [
        0.0,
        1.0,
        2.0,
        3.0,
        4.0,
        4.0,
        4.0,
        3.5,
        3.0,
        2.5,
        2.0,
        2.0,
        2.0,
    ]
    schedule = Chain([Segment(Linear(3, 0.5), 0, 3), Segment(Step(2, 0.5), 4, 7)])
    assert values_of(schedule, 8.0, 10) == [4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 4.0]
    assert values_of(Chain([]), 8.0, 2) == [8.0, 8.0]


def test_before_its_begin_a_segment_does_nothing_and_in_its_last_iteration_it_is_at_its_end():
    for schedule, value in (
        (Constant(1, 0.5), 4.0),
        (Linear(1, 0.5, 0.75), 3.0),
        (Polynomial(1, end_value=1.0), 1.0),
    ):
        assert Chain([Segment(schedule, 2, 3)])(2, 4.0) == value
    assert Chain([Segment(Polynomial(6), 0, 6)])(100, 0.3) == 0.0
    assert values_of(Chain([Segment(Constant(9, 0.5), 2, 6)]), 8.0, 4) == [8.0, 8.0, 4.0, 4.0]


@SCHEDULE_REGISTRY.register()
def Halve(length, often=1):  # as a class would be called
    return lambda t, base: base / 2 ** (often * t // length)


def make_cfg(*entries, **solver):
    cfg = get_cfg()
    cfg.merge_from_other_cfg({"SOLVER": {"MAX_ITER": 10, "SCHEDULES": list(entries), **solver}})
    return cfg


def build(cfg, lr=1.0):
    return build_lr_scheduler(cfg, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr))


def lrs_of(cfg, count=12, lr=1.0):
    scheduler = build(cfg, lr)
    lrs = []
    for _ in range(count):
        lrs += scheduler.get_last_lr()
        scheduler.optimizer.step()
        scheduler.step()
    return lrs


def test_entries_become_segments_that_end_with_the_run():
    entries = [
        {"NAME": "Linear", "END": 4, "START_FACTOR": 0.5},
        {"NAME": "Cosine", "BEGIN": 4, "END_RATIO": 0.25},
    ]
    expected = Chain(
        [Segment(Linear(4, start_factor=0.5), 0, 4), Segment(Cosine(6, end_ratio=0.25), 4, 10)]
    )
    found = build_schedule(entries, 10, "here")
    assert [found(t, 0.3) for t in range(25)] == [expected(t, 0.3) for t in range(25)]


def test_schedules_replace_the_schedule_with_a_name_and_the_log_says_so(caplog):
    caplog.set_level(logging.INFO)
    cfg = make_cfg(
        {"NAME": "Step", "STEP_SIZE": 4, "GAMMA": 0.5},
        LR_SCHEDULER_NAME="nonsense",
        WARMUP_ITERS=99,
    )
    # the last value, that of iteration 9, stays
    assert lrs_of(cfg) == [1.0] * 4 + [0.5] * 4 + [0.25] * 4
    [text] = [text for text in caplog.messages if text.startswith("SOLVER.SCHEDULES is used")]
    assert "SOLVER.LR_SCHEDULER_NAME" in text
    assert "SOLVER.WARMUP_*" in text
    assert isinstance(build(make_cfg(WARMUP_ITERS=0)), LRMultiplier)


def test_lengths_in_epochs_are_resolved_before():
    entry = {"NAME": "MultiStep", "MILESTONES": ["1ep", 8], "GAMMA": 0.5}
    cfg = make_cfg({"NAME": "Linear", "END": "0.5ep", "START_FACTOR": 0.5}, entry)
    assert lrs_of(resolve_lengths(cfg, 6)) == [
        0.5,
        0.75,
        1.0,
        1.0,
        1.0,
        1.0,
        0.5,
        0.5,
        0.25,
        0.25,
        0.25,
        0.25,
    ]
    with pytest.raises(
        ConfigError, match=r"SCHEDULES\[0\] \(Linear\): END: got '0.5ep' .*accepted: iterations"
    ):
        build(cfg)


def test_a_schedule_of_the_users_is_found_and_gets_its_length():
    assert lrs_of(make_cfg({"NAME": "Halve", "END": 4, "OFTEN": 2}), 5) == [1.0, 1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("entry", "make"),
    [
        ({"NAME": "Cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, 6)),
        (
            {"NAME": "MultiStep", "MILESTONES": ["2ep", "4ep"]},
            lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
        ),
    ],
)
def test_a_value_may_be_held_for_an_epoch_as_by_openmmlabs_by_epoch(entry, make):
    rates = values_by_torch(make, 0.4, 6)
    for iters_per_epoch in (1, 4):
        cfg = resolve_lengths(
            make_cfg({**entry, "STEP_SIZE": "1ep"}, MAX_ITER="6ep"), iters_per_epoch
        )
        expected = [rate for rate in rates for _ in range(iters_per_epoch)]
        assert lrs_of(cfg, len(expected), lr=0.4) == pytest.approx(expected)
    if entry["NAME"] != "MultiStep":
        every_iteration = resolve_lengths(make_cfg(entry, MAX_ITER="6ep"), iters_per_epoch)
        assert lrs_of(every_iteration, len(expected), lr=0.4) != pytest.approx(expected)


def test_an_entry_that_never_begins_has_no_effect_and_a_warning_says_so(caplog):
    assert lrs_of(make_cfg({"NAME": "Linear", "BEGIN": 10, "START_FACTOR": 0.5}), 10) == [1.0] * 10
    assert "SOLVER.SCHEDULES[0] (Linear) has no effect: it starts at 10" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "Cosine",
            r"SCHEDULES\[1\] must be an entry such as \{NAME: Linear, END: 500\} .*; got 'Cosine'",
        ),
        (
            {"NAME": "CosineAnneal"},
            r"SCHEDULES\[1\] \(CosineAnneal\): NAME: .*did you mean 'Cosine'",
        ),
        (
            {"NAME": "Step", "STEPSIZE": 3},
            r"\[1\] \(Step\): unknown 'STEPSIZE'; did you mean 'STEP_SIZE'",
        ),
        ({"NAME": "Step", "STEP_SIZE": 0}, r"\[1\] \(Step\) refuses STEP_SIZE=0: "),
        ({"NAME": "MultiStep", "MILESTONES": 5}, r"\[1\] \(MultiStep\) refuses MILESTONES=5: "),
        (
            {"NAME": "CosineRestarts", "PERIODS": [2, 3], "WEIGHTS": [1]},
            "weights must be one for each period",
        ),
        ({"NAME": "OneCycle", "PCT_START": 0.1}, "pct_start 0.1 leaves no room"),
        (
            {"NAME": "Cosine", "END_VALUE": 0.1, "END_RATIO": 0.2},
            "end_value 0.1 and end_ratio 0.2 both",
        ),
        (
            {"NAME": "Cosine", "BEGIN": 5, "END": 5},
            r"\[1\] \(Cosine\): END: got 5 .*accepted: iterations, an int >= 6",
        ),
    ],
    ids=str,
)
def test_a_wrong_entry_is_an_error_that_names_it(entry, message):
    with pytest.raises(ConfigError, match=message):
        build(make_cfg({"NAME": "Linear"}, entry))


# arguments of a schedule that is right
RIGHT = {
    "length": 9,
    "milestones": [2, 5],
    "periods": [3, 4],
    "weights": [1.0, 0.5],
    "timescale": 5,
    "step_size": 2,
    "gamma": 0.5,
    "factors": [1.0, 0.5],
}
LENGTHS = {"length", "milestones", "periods", "timescale", "step_size"}
NAN, INF = float("nan"), float("inf")


def numbers_of_all_schedules():
    for name, schedule in SCHEDULE_REGISTRY:
        if schedule.__module__ == Constant.__module__:
            for argument in inspect.signature(schedule).parameters.values():
                if argument.name not in ("anneal", "three_phase"):
                    yield pytest.param(schedule, argument.name, id=f"{name}.{argument.name}")


@pytest.mark.parametrize(("schedule", "argument"), [*numbers_of_all_schedules()])
def test_a_number_out_of_its_range_is_an_error_that_names_the_argument(schedule, argument):
    known = inspect.signature(schedule).parameters
    right = {name: value for name, value in RIGHT.items() if name in known}
    wrong = [NAN, INF, "much", -1]
    if argument in LENGTHS:
        wrong += [0.5, True]
    for value in wrong:
        is_list = isinstance(RIGHT.get(argument), list)
        given = [RIGHT[argument][0], value] if is_list else value
        with pytest.raises(ValueError, match=rf"{argument} must be .*got {value!r}"):
            schedule(**{**right, argument: given})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"NAME": "Linear", "START_FACTOR": -1, "END": 4},
            r"SCHEDULES\[0\] \(Linear\) refuses START_FACTOR=-1.*: start_factor must be a number in \[0, inf\)",
        ),
        ({"NAME": "Step", "STEP_SIZE": -2}, "step_size must be a whole number >= 1, got -2"),
        ({"NAME": "Step", "STEP_SIZE": 2, "GAMMA": -0.1}, r"gamma must be a number in \[0, inf\)"),
        ({"NAME": "Polynomial", "POWER": 0}, r"power must be a number in \(0, inf\), got 0"),
        ({"NAME": "OneCycle", "DIV_FACTOR": 0}, r"div_factor must be a number in \(0, inf\)"),
        ({"NAME": "OneCycle", "PCT_START": 1.5}, r"pct_start must be a number in \[0, 1\]"),
        ({"NAME": "Cosine", "END_VALUE": -1e-6}, r"end_value must be a number in \[0, inf\)"),
        ({"NAME": "Cosine", "STEP_SIZE": 0}, r"\(Cosine\): STEP_SIZE: got 0"),
        ({"NAME": "InverseSquareRoot", "TIMESCALE": 0}, "timescale must be a whole number >= 1"),
        ({"NAME": "CosineRestarts", "PERIODS": []}, "periods must be a list"),
        ({"NAME": "Cosine", "BEGIN": -1}, r"\(Cosine\): BEGIN: got -1"),
    ],
    ids=str,
)
def test_a_wrong_number_of_an_entry_is_an_error_that_names_entry_argument_and_range(entry, message):
    with pytest.raises(ConfigError, match=message):
        build(make_cfg(entry))
