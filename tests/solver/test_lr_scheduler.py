"""Schedulers, and the schedules with a warm-up."""

import pytest
import torch
from fvcore.common.param_scheduler import (
    CosineParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
)
from torch import nn

from trainkit.solver import LRMultiplier, ScheduledLR, WarmupParamScheduler


def make_optimizer(*lrs):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs])


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def run(scheduler, num_steps):
    """The learning rate of the first group in use at each iteration, and after the last step."""
    lrs = rates(scheduler.optimizer)[:1]
    for _ in range(num_steps):
        scheduler.optimizer.step()
        scheduler.step()
        lrs += rates(scheduler.optimizer)[:1]
    return lrs


FALL = LinearParamScheduler(1.0, 0.0)
SCHEDULERS = {
    "multiplier": lambda optimizer: LRMultiplier(optimizer, FALL, 8),
    "function": lambda optimizer: ScheduledLR(optimizer, lambda t, base: base * (1 - t / 8)),
}
each_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0.5, 0.5, "constant"), [0.5, 0.5, 0.5, 0.25, 0.0]),
        ((0.0, 0.5), [0.0, 0.25, 0.5, 0.25, 0.0]),
        ((0.0, 0.5, "linear", True), [0.0, 0.5, 1.0, 0.5, 0.0]),
        ((0.001, 0.0), [1.0, 0.75, 0.5, 0.25, 0.0]),
    ],
)
def test_a_schedule_with_a_warm_up_has_these_values(arguments, expected):
    found = WarmupParamScheduler(FALL, *arguments)
    assert [found(where) for where in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0.1, 0.5, "exp"), "warmup_method"),
        ((0.1, -0.1), "warmup_length"),
        ((0.1, 1.0, "linear", True), "warmup_length"),
    ],
)
def test_a_wrong_warm_up_is_an_error_that_names_the_argument(arguments, named):
    with pytest.raises(ValueError, match=f"{named} must be "):
        WarmupParamScheduler(CosineParamScheduler(1, 0), *arguments)


def test_the_last_value_stays_from_the_end_on():
    """fvcore's schedules raise an error there, or rise again."""
    steps = MultiStepParamScheduler([1, 0.1], milestones=[5], num_updates=10)
    for schedule in (steps, CosineParamScheduler(1.0, 0.1), WarmupParamScheduler(steps, 0.5, 0.2)):
        assert run(LRMultiplier(make_optimizer(1.0), schedule, 10), 13)[10:] == [0.1] * 4


@each_scheduler
def test_each_group_starts_from_its_own_rate_and_a_fixed_one_keeps_it(make):
    optimizer = make_optimizer(1.0, 4.0, 1.0)
    optimizer.param_groups[2]["fixed_lr"] = True
    scheduler = make(optimizer)
    # not replaced
    assert type(optimizer).step == torch.optim.SGD.step
    assert "step" not in vars(optimizer)
    run(scheduler, 4)
    scheduler.factors = [0.5]
    scheduler.step(4)
    assert scheduler.get_last_lr() == rates(optimizer) == [0.25, 1.0, 1.0]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1.0, 4.0, 1.0]


@each_scheduler
def test_factors_multiply_one_after_the_other_and_are_resumed(make):
    scheduler = make(make_optimizer(0.7))
    scheduler.factors = [0.1] * 3
    run(scheduler, 2)
    assert scheduler.get_last_lr() == [0.7 * 0.75 * 0.1 * 0.1 * 0.1]
    assert scheduler.get_last_lr() != [0.7 * 0.75 * 0.1**3]  # the comparison can fail
    state = scheduler.state_dict()
    last_lr = [0.7 * 0.75 * 0.1 * 0.1 * 0.1]
    assert state == {"base_lrs": [0.7], "last_epoch": 2, "factors": [0.1] * 3, "last_lr": last_lr}
    resumed = make(make_optimizer(0.7))
    resumed.load_state_dict(state)
    assert run(resumed, 2)[1:] == run(scheduler, 2)[1:]
    del state["factors"], state["last_lr"]  # states of detectron2
    resumed.load_state_dict(state)
    assert run(resumed, 1)[1] == 0.7 * 0.625


def test_a_resumed_schedule_has_the_bits_of_the_checkpoint_and_the_length_of_the_config():
    def make(lr=0.3, length=10):
        schedule = WarmupParamScheduler(CosineParamScheduler(1, 0), 0.001, 0.3)
        return LRMultiplier(make_optimizer(lr), schedule, length)

    whole, first = run(make(), 10), make()
    begin = run(first, 4)
    for length, equal in ((10, True), (20, False)):
        resumed = make(0.7, length)
        resumed.optimizer.load_state_dict(first.optimizer.state_dict())
        resumed.load_state_dict(first.state_dict())
        assert (begin[:-1] + run(resumed, 6) == whole) is equal


def test_a_tensor_is_filled_in_place_and_a_plain_number_in_the_state():
    lr = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = SCHEDULERS["function"](optimizer)
    run(scheduler, 2)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.375
    assert scheduler.get_last_lr() == [0.375]
    assert scheduler.state_dict() == {
        "base_lrs": [0.5],
        "last_epoch": 2,
        "factors": [],
        "last_lr": [0.375],
    }
    assert type(scheduler.state_dict()["base_lrs"][0]) is float
