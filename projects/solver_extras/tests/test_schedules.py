"""Values of schedules: against torch, against OpenMMLab's closed forms, and by hand."""

import math
import warnings

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
    Polynomial,
    Segment,
    Step,
    WarmupStableDecay,
)

BASES = [1.0, 7e-4]


def make_optimizer(base):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=base, momentum=0.9)


def recursive(make, base, count):
    """What torch uses, step by step."""
    optimizer = make_optimizer(base)
    scheduler = make(optimizer)
    values = [optimizer.param_groups[0]["lr"]]
    for _ in range(count - 1):
        optimizer.step()
        scheduler.step()
        values.append(optimizer.param_groups[0]["lr"])
    return values


def closed(make, base, count):
    """torch's closed form, which it uses for ``step(epoch)``."""
    optimizer = make_optimizer(base)
    scheduler = make(optimizer)
    values = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # step(epoch) is deprecated
        for t in range(count):
            scheduler.step(t)
            values.append(optimizer.param_groups[0]["lr"])
    return values


def values_of(schedule, base, count):
    return [schedule(t, base) for t in range(count)]


# name: ours, torch's, a torch one that differs by one in its length or a little in a value
LIKE_TORCH = {
    "constant": (
        Constant(7, 0.3),
        lambda o: lr_scheduler.ConstantLR(o, 0.3, total_iters=6),
        lambda o: lr_scheduler.ConstantLR(o, 0.3, total_iters=7),
    ),
    "linear": (
        Linear(8, 0.3, 0.9),
        lambda o: lr_scheduler.LinearLR(o, 0.3, 0.9, total_iters=7),
        lambda o: lr_scheduler.LinearLR(o, 0.3, 0.9, total_iters=8),
    ),
    "step": (Step(3, 0.7), lambda o: lr_scheduler.StepLR(o, 3, 0.7), lambda o: lr_scheduler.StepLR(o, 4, 0.7)),
    "multi-step": (
        MultiStep([2, 5, 5, 9], 0.7),
        lambda o: lr_scheduler.MultiStepLR(o, [5, 2, 9, 5], 0.7),
        lambda o: lr_scheduler.MultiStepLR(o, [5, 2, 9], 0.7),
    ),
    "exponential": (
        Exponential(0.7),
        lambda o: lr_scheduler.ExponentialLR(o, 0.7),
        lambda o: lr_scheduler.ExponentialLR(o, 0.71),
    ),
    "cosine": (
        Cosine(9, end_value=1e-5),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 9, eta_min=1e-5),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 8, eta_min=1e-5),
    ),
    "polynomial": (
        Polynomial(8, 0.9),
        lambda o: lr_scheduler.PolynomialLR(o, 7, 0.9),
        lambda o: lr_scheduler.PolynomialLR(o, 8, 0.9),
    ),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", LIKE_TORCH)
def test_a_schedule_equals_torchs_closed_form_bit_by_bit_and_its_steps_nearly(name, base):
    ours, theirs, other = LIKE_TORCH[name]
    values = values_of(ours, base, 15)
    assert values == closed(theirs, base, 15)
    assert values != closed(other, base, 15)
    stepped = recursive(theirs, base, 10)  # to the end of the shortest cosine, where the recursion divides by 0
    assert values[:10] == pytest.approx(stepped, rel=1e-12, abs=1e-12 * base)
    assert values[:10] != pytest.approx(recursive(other, base, 10), rel=1e-12, abs=1e-12 * base)


ONE_CYCLES = [
    {},
    {"anneal": "linear"},
    {"pct_start": 0.45, "three_phase": True},
    {"pct_start": 0.25, "three_phase": True, "anneal": "linear", "div_factor": 7.0, "final_div_factor": 30.0},
    {"pct_start": 0.04},
]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("arguments", ONE_CYCLES, ids=str)
def test_one_cycle_equals_torchs_bit_by_bit(arguments, base):
    def theirs(length):
        options = {"anneal_strategy" if key == "anneal" else key: value for key, value in arguments.items()}
        return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, base, total_steps=length, **options)

    values = values_of(OneCycle(19, **arguments), base, 19)
    assert values == recursive(theirs(19), base, 19)
    assert values != recursive(theirs(20), base, 19)
    assert OneCycle(19, **arguments)(25, base) == values[-1]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("periods", "factor"), [([4, 8, 16], 2), ([5, 5, 5], 1)])
def test_cosine_restarts_equal_torchs_bit_by_bit(periods, factor, base):
    def theirs(end):
        return lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, periods[0], factor, eta_min=end)

    count = sum(periods)
    values = values_of(CosineRestarts(periods, end_value=1e-5), base, count)
    assert values == recursive(theirs(1e-5), base, count)
    assert values != recursive(theirs(0.0), base, count)


def test_cosine_restarts_begin_at_their_weights_and_keep_the_last_value():
    schedule = CosineRestarts([2, 4], [1.0, 0.5], end_ratio=0.25)
    root = math.sqrt(0.5)
    expected = [4.0, 2.5, 2.0, 1.5 + 0.5 * root, 1.5, 1.5 - 0.5 * root]
    assert values_of(schedule, 4.0, 9) == pytest.approx([*expected, *expected[-1:] * 3], rel=1e-14)


# ---------------------------------------------------------------------------- the others


def test_an_exponential_warmup_is_the_factor_to_the_share_that_is_left():
    assert values_of(ExponentialWarmup(5, 0.0625), 3.0, 7) == [3 * 0.0625 ** (1 - t / 4) for t in range(4)] + [3.0] * 3
    assert values_of(ExponentialWarmup(5, 0.0625), 1.0, 5) == [0.0625, 0.125, 0.25, 0.5, 1.0]


def test_an_inverse_square_root_goes_on_from_a_warmup_of_its_timescale():
    assert values_of(InverseSquareRoot(4), 2.0, 13)[::12] == [2.0, 1.0]
    schedule = Chain([Segment(Linear(101, 0.0), 0, 101), Segment(InverseSquareRoot(100), 100, 10_000)])
    vaswani = [min(t**-0.5, t * 100**-1.5) for t in range(1, 900)]
    assert [schedule(t, 0.1) for t in range(1, 900)] == pytest.approx(vaswani, rel=1e-12)


def test_warmup_stable_decay_rises_stays_and_falls():
    assert values_of(WarmupStableDecay(11, 4, 4, end_ratio=0.5), 4.0, 13) == [
        *(0.0, 1.0, 2.0, 3.0, 4.0, 4.0, 4.0),
        *(3.5, 3.0, 2.5, 2.0, 2.0, 2.0),
    ]
    assert values_of(WarmupStableDecay(4, 0, 2, end_value=1.0), 3.0, 4) == [3.0, 3.0, 2.0, 1.0]
    assert values_of(WarmupStableDecay(7, 2, 2, start_factor=0.5, anneal="cos"), 1.0, 7) == pytest.approx(
        [0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.0]
    )


@pytest.mark.parametrize("make", [Cosine, Polynomial, lambda length, **end: WarmupStableDecay(length, 1, 3, **end)])
def test_an_end_can_be_a_value_or_a_ratio_of_the_base(make):
    by_value, by_ratio = make(8, end_value=0.5), make(8, end_ratio=0.25)
    assert values_of(by_value, 2.0, 8) == values_of(by_ratio, 2.0, 8)
    assert values_of(by_value, 4.0, 8) != values_of(by_ratio, 4.0, 8)
    assert values_of(make(8), 2.0, 8) == values_of(make(8, end_value=0.0), 2.0, 8)


# ---------------------------------------------------------------------------- composition


def test_segments_go_on_from_each_other_and_keep_their_last_value():
    schedule = Chain([Segment(Linear(3, 0.5), 0, 3), Segment(Step(2, 0.5), 4, 7)])
    assert values_of(schedule, 8.0, 10) == [4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 4.0]


def test_before_its_begin_a_segment_does_nothing_and_in_its_last_iteration_it_is_at_its_end():
    for schedule, value in ((Constant(1, 0.5), 4.0), (Linear(1, 0.5, 0.75), 3.0), (Polynomial(1, end_value=1.0), 1.0)):
        assert Chain([Segment(schedule, 2, 3)])(2, 4.0) == value
    assert Chain([Segment(Polynomial(6), 0, 6)])(100, 0.3) == 0.0
    assert values_of(Chain([Segment(Constant(9, 0.5), 2, 6)]), 8.0, 4) == [8.0, 8.0, 4.0, 4.0]
    assert values_of(Chain([]), 8.0, 2) == [8.0, 8.0]
