import math

import pytest
import torch
from fvcore.common.param_scheduler import (
    ConstantParamScheduler,
    CosineParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    StepParamScheduler,
    StepWithFixedGammaParamScheduler,
)
from torch import nn

from trainkit.solver import KeepLastValue, LRFunction, LRMultiplier, WarmupParamScheduler


def make_optimizer(*lrs):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs])


def run(scheduler, num_steps):
    """The learning rate of the first group in use at each iteration, and after the last step."""
    optimizer = scheduler.optimizer
    lrs = [optimizer.param_groups[0]["lr"]]
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        lrs.append(optimizer.param_groups[0]["lr"])
    return lrs


STEP_LIKE = {
    "constant": (lambda: ConstantParamScheduler(0.5), 0.5),
    "step": (lambda: StepParamScheduler(10, [1.0, 0.1]), 0.1),
    "fixed gamma": (lambda: StepWithFixedGammaParamScheduler(1.0, 2, 0.5, 10), 0.25),
}


def test_multi_step_with_linear_warmup_gives_these_values():
    schedule = WarmupParamScheduler(
        MultiStepParamScheduler([1, 0.1, 0.01, 0.001], milestones=[10, 15, 20], num_updates=30), 0.001, 5 / 30
    )
    lrs = run(LRMultiplier(make_optimizer(5.0), schedule, 30), 30)
    assert lrs[:5] == pytest.approx([0.005, 1.004, 2.003, 3.002, 4.001])
    assert lrs[5:] == pytest.approx([5.0] * 5 + [0.5] * 5 + [0.05] * 5 + [0.005] * 11)


def test_cosine_with_linear_warmup_joins_the_cosine_where_the_warmup_ends():
    schedule = WarmupParamScheduler(CosineParamScheduler(1, 0), 0.001, 5 / 30)
    lrs = run(LRMultiplier(make_optimizer(5.0), schedule, 30), 30)
    at_5 = 2.5 * (1 + math.cos(math.pi * 5 / 30))
    assert lrs[:5] == pytest.approx([0.005 + (at_5 - 0.005) * iter / 5 for iter in range(5)])
    assert lrs[5:] == pytest.approx([2.5 * (1 + math.cos(math.pi * iter / 30)) for iter in range(5, 31)])


def test_constant_warmup_stays_until_the_schedule_takes_over():
    schedule = WarmupParamScheduler(LinearParamScheduler(1.0, 0.0), 0.5, 0.5, "constant")
    assert [schedule(where) for where in (0.0, 0.25, 0.49, 0.5, 0.75, 1.0)] == [0.5, 0.5, 0.5, 0.5, 0.25, 0.0]


def test_an_exponential_warmup_rises_by_the_same_factor_to_where_the_schedule_is():
    schedule = WarmupParamScheduler(ConstantParamScheduler(1.0), 0.25, 0.5, "exponential")
    assert [schedule(where) for where in (0.0, 0.25, 0.5, 0.75)] == [0.25, 0.25**0.5, 1.0, 1.0]
    schedule = WarmupParamScheduler(LinearParamScheduler(1.0, 0.0), 0.25, 0.5, "exponential")
    assert [schedule(where) for where in (0.0, 0.25, 0.5, 0.75)] == pytest.approx([0.25, 0.125**0.5, 0.5, 0.25])


def test_a_rescaled_schedule_begins_where_the_warmup_ends():
    schedule = WarmupParamScheduler(LinearParamScheduler(1.0, 0.0), 0.0, 0.5, rescale_interval=True)
    assert [schedule(where) for where in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.0, 0.5, 1.0, 0.5, 0.0]


def test_a_warmup_of_no_length_changes_nothing():
    schedule = WarmupParamScheduler(LinearParamScheduler(1.0, 0.0), 0.001, 0.0)
    assert [schedule(where) for where in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_method": "exp"}, "warmup_method.*linear, constant or exponential, got 'exp'"),
        ({"warmup_length": -0.1}, "warmup_length.*between 0 and 1.*got -0.1"),
        ({"warmup_length": 1.1}, "warmup_length.*between 0 and 1.*got 1.1"),
        ({"warmup_length": 1.0, "rescale_interval": True}, "warm-up that is shorter than the training"),
        (
            {"warmup_method": "exponential", "warmup_factor": 0.0},
            r"start and end above 0, got WARMUP_FACTOR 0.0 and a schedule that is 0.5 .*use linear",
        ),
        ({"warmup_method": "exponential", "warmup_length": 1.0}, "a schedule that is 0.0 when it ends"),
    ],
    ids=str,
)
def test_a_wrong_warmup_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        WarmupParamScheduler(CosineParamScheduler(1, 0), **{"warmup_factor": 0.1, "warmup_length": 0.5, **arguments})


def test_multi_step_equals_torchs_multi_step():
    schedule = MultiStepParamScheduler([1, 0.5, 0.25], milestones=[3, 6], num_updates=10)
    ours = LRMultiplier(make_optimizer(0.8), schedule, 10)
    theirs = torch.optim.lr_scheduler.MultiStepLR(make_optimizer(0.8), [3, 6], gamma=0.5)
    other_steps = torch.optim.lr_scheduler.MultiStepLR(make_optimizer(0.8), [3, 7], gamma=0.5)
    lrs = run(ours, 10)
    assert lrs == run(theirs, 10)
    assert lrs != run(other_steps, 10)


def test_cosine_equals_torchs_cosine_annealing():
    ours = LRMultiplier(make_optimizer(0.8), CosineParamScheduler(1.0, 0.25), 12)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(make_optimizer(0.8), T_max=12, eta_min=0.2)
    assert run(ours, 12) == pytest.approx(run(theirs, 12))


def test_linear_warmup_equals_torchs_linear_lr():
    schedule = WarmupParamScheduler(KeepLastValue(ConstantParamScheduler(1.0)), 0.1, 4 / 10)
    ours = LRMultiplier(make_optimizer(0.8), schedule, 10)
    theirs = torch.optim.lr_scheduler.LinearLR(make_optimizer(0.8), start_factor=0.1, total_iters=4)
    other_length = torch.optim.lr_scheduler.LinearLR(make_optimizer(0.8), start_factor=0.1, total_iters=5)
    lrs = run(ours, 10)
    assert lrs == pytest.approx(run(theirs, 10))
    assert lrs != pytest.approx(run(other_length, 10))


def test_each_group_is_scaled_from_its_own_lr():
    optimizer = make_optimizer(1.0, 4.0)
    scheduler = LRMultiplier(optimizer, LinearParamScheduler(1.0, 0.0), 4)
    run(scheduler, 1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.75, 3.0]
    assert scheduler.get_last_lr() == [0.75, 3.0]


def test_after_twelve_iterations_last_epoch_is_twelve():
    scheduler = LRMultiplier(make_optimizer(1.0), CosineParamScheduler(1, 0), 12)
    run(scheduler, 12)
    assert scheduler.last_epoch == 12


def test_the_state_is_three_plain_entries():
    scheduler = LRMultiplier(make_optimizer(1.0, 4.0), LinearParamScheduler(1.0, 0.0), 4)
    run(scheduler, 3)
    assert scheduler.state_dict() == {"base_lrs": [1.0, 4.0], "last_epoch": 3, "factors": []}


def test_a_tensor_lr_is_a_plain_number_in_the_state():
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    state = LRMultiplier(optimizer, LinearParamScheduler(1.0, 0.0), 4).state_dict()
    assert state == {"base_lrs": [0.5], "last_epoch": 0, "factors": []}
    assert type(state["base_lrs"][0]) is float


def test_a_resumed_schedule_gives_the_same_learning_rates_bit_by_bit():
    def make(lr=0.3):
        optimizer = make_optimizer(lr)
        return optimizer, LRMultiplier(optimizer, WarmupParamScheduler(CosineParamScheduler(1, 0), 0.001, 0.3), 10)

    _, scheduler = make()
    whole = run(scheduler, 10)

    optimizer, scheduler = make()
    first = run(scheduler, 4)
    resumed_optimizer, resumed = make(lr=0.7)  # values come from the checkpoint, not from the new config
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert first[:-1] + run(resumed, 6) == whole
    assert run(make(lr=0.7)[1], 10) != whole


def test_the_length_of_a_resumed_schedule_comes_from_the_config():
    scheduler = LRMultiplier(make_optimizer(1.0), LinearParamScheduler(1.0, 0.0), 4)
    run(scheduler, 2)
    longer = LRMultiplier(make_optimizer(1.0), LinearParamScheduler(1.0, 0.0), 8)
    longer.load_state_dict(scheduler.state_dict())
    assert run(longer, 1)[-1] == 1.0 - 3 / 8


def test_last_iter_continues_a_schedule():
    optimizer = make_optimizer(1.0)
    optimizer.param_groups[0]["initial_lr"] = 1.0
    scheduler = LRMultiplier(optimizer, LinearParamScheduler(1.0, 0.0), 4, last_iter=1)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (2, 0.5)


def test_a_state_of_another_number_of_groups_is_an_error():
    state = LRMultiplier(make_optimizer(1.0, 2.0), LinearParamScheduler(1.0, 0.0), 4).state_dict()
    scheduler = LRMultiplier(make_optimizer(1.0), LinearParamScheduler(1.0, 0.0), 4)
    with pytest.raises(ValueError, match="of 2 parameter groups, the optimizer has 1"):
        scheduler.load_state_dict(state)


def test_a_multiplier_that_is_no_param_scheduler_is_an_error():
    with pytest.raises(TypeError, match=r"multiplier must be a fvcore ParamScheduler, got 1\.0"):
        LRMultiplier(make_optimizer(1.0), 1.0, 4)


def test_a_schedule_of_no_length_is_an_error():
    with pytest.raises(ValueError, match=r"max_iter.*must be >= 1 iteration, got 0"):
        LRMultiplier(make_optimizer(1.0), CosineParamScheduler(1, 0), 0)


# ---------------------------------------------------------------------------- functions, fixed groups, reductions


def test_a_function_of_the_iteration_gets_the_first_lr_of_each_group():
    optimizer = make_optimizer(1.0, 4.0, 1.0)
    scheduler = LRFunction(optimizer, lambda t, base: base + t)
    run(scheduler, 2)
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == [3.0, 6.0, 3.0]


def test_a_function_goes_on_past_any_end_and_from_any_iteration():
    optimizer = make_optimizer(1.0)
    optimizer.param_groups[0]["initial_lr"] = 1.0
    assert run(LRFunction(optimizer, lambda t, base: base + t, last_iter=6), 1) == [8.0, 9.0]


def test_what_is_no_function_is_an_error():
    with pytest.raises(TypeError, match=r"schedule must be a function of the iteration and the first value, got 0\.1"):
        LRFunction(make_optimizer(1.0), 0.1)


SCHEDULERS = {
    "multiplier": lambda optimizer: LRMultiplier(optimizer, LinearParamScheduler(1.0, 0.0), 8),
    "function": lambda optimizer: LRFunction(optimizer, lambda t, base: base * (1 - t / 8)),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_group_that_says_fixed_lr_keeps_its_first_lr(make):
    optimizer = make_optimizer(1.0, 4.0)
    optimizer.param_groups[1]["fixed_lr"] = True
    scheduler = make(optimizer)
    run(scheduler, 4)
    scheduler.reduce(0.5)
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == [0.25, 4.0]
    optimizer.param_groups[1]["fixed_lr"] = False
    assert run(scheduler, 1) == [0.25, 0.5 * 3 / 8]
    assert optimizer.param_groups[1]["lr"] == 2.0 * 3 / 8


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_reduction_is_applied_at_once_and_stays(make):
    scheduler = make(make_optimizer(1.0))
    run(scheduler, 2)
    scheduler.reduce(0.5)
    assert run(scheduler, 2) == [0.375, 0.3125, 0.25]
    scheduler.reduce(0.5)
    assert run(scheduler, 1) == [0.125, 0.25 * 3 / 8]
    assert scheduler.factors == [0.5, 0.5]
    scheduler.set_factors([])
    assert run(scheduler, 0) == [3 / 8]


def test_reductions_multiply_one_after_the_other():
    scheduler = LRFunction(make_optimizer(0.7), lambda t, base: base)
    for _ in range(3):
        scheduler.reduce(0.1)
    assert scheduler.get_last_lr() == [0.7 * 0.1 * 0.1 * 0.1]
    assert scheduler.get_last_lr() != [0.7 * 0.1**3]  # the comparison can fail: the order of the operations shows


def test_reductions_stay_at_their_floor():
    scheduler = LRFunction(make_optimizer(0.7), lambda t, base: base)
    for _ in range(4):
        scheduler.reduce(0.5, floor=0.2)
    assert (scheduler.get_last_lr(), scheduler.factors) == ([0.7 * 0.2], [0.2])


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_reductions_are_resumed_and_states_without_them_load(make):
    scheduler = make(make_optimizer(1.0))
    run(scheduler, 2)
    scheduler.reduce(0.5)
    state = scheduler.state_dict()
    assert state == {"base_lrs": [1.0], "last_epoch": 2, "factors": [0.5]}
    resumed = make(make_optimizer(1.0))
    resumed.load_state_dict(state)
    assert run(resumed, 1)[-1] == run(scheduler, 1)[-1] == 0.3125
    assert state["factors"] == [0.5]
    resumed.reduce(0.5)
    assert state["factors"] == [0.5]  # the state is a copy

    del state["factors"]
    resumed = make(make_optimizer(1.0))
    resumed.load_state_dict(state)
    assert run(resumed, 1)[-1] == 0.625


def test_a_tensor_lr_is_filled_in_place_with_the_same_values():
    lr = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = SCHEDULERS["function"](optimizer)
    run(scheduler, 2)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.375
    scheduler.reduce(0.5)
    assert (lr.item(), scheduler.get_last_lr()) == (0.1875, [0.1875])


def test_a_scheduler_can_be_sent_to_another_iteration():
    scheduler = SCHEDULERS["function"](make_optimizer(1.0))
    run(scheduler, 5)
    scheduler.seek(1)
    assert (scheduler.last_epoch, run(scheduler, 1)) == (1, [0.875, 0.75])


# ---------------------------------------------------------------------------- the end of a schedule


@pytest.mark.parametrize(("make", "last"), STEP_LIKE.values(), ids=STEP_LIKE)
def test_a_schedule_keeps_its_last_value_at_and_past_the_end(make, last):
    schedule = KeepLastValue(make())
    assert [schedule(where) for where in (0.999999999, 1.0, 1.5)] == [last] * 3
    assert [schedule(where) for where in (0.0, 0.3, 0.9)] == [make()(where) for where in (0.0, 0.3, 0.9)]


@pytest.mark.parametrize(("make", "last"), STEP_LIKE.values(), ids=STEP_LIKE)
def test_a_hand_made_multiplier_still_fails_at_the_end_of_such_a_schedule(make, last):
    with pytest.raises((RuntimeError, IndexError)):
        run(LRMultiplier(make_optimizer(1.0), make(), 10), 10)
    assert run(LRMultiplier(make_optimizer(1.0), KeepLastValue(make()), 10), 12)[-3:] == [last] * 3


def test_a_hand_made_multiplier_with_a_warmup_still_fails_past_the_end():
    schedule = WarmupParamScheduler(MultiStepParamScheduler([1, 0.1], milestones=[5], num_updates=10), 0.1, 0.2)
    with pytest.raises(RuntimeError, match=r"must be in \[0, 1\]: got 1.1"):
        run(LRMultiplier(make_optimizer(1.0), schedule, 10), 11)
    assert run(LRMultiplier(make_optimizer(1.0), KeepLastValue(schedule), 10), 12)[-1] == 0.1


def test_a_cosine_does_not_rise_again_past_its_end():
    assert CosineParamScheduler(1.0, 0.1)(1.1) > 0.12
    assert [KeepLastValue(CosineParamScheduler(1.0, 0.1))(where) for where in (1.0, 1.1, 2.0)] == [0.1] * 3
