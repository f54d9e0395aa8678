"""Hooks that change numbers of the optimizer: by a schedule, and after evaluations without progress."""

import math
import random

import pytest
import torch
from fvcore.common.param_scheduler import ConstantParamScheduler, LinearParamScheduler
from torch import nn
from torch.optim import lr_scheduler

from tests.engine.tiny import Steps, Weight, sgd
from trainkit.config import ConfigError
from trainkit.engine.hooks import (
    CallbackHook,
    EvalHook,
    LRScheduler,
    ParamScheduler,
    ReduceOnPlateau,
)
from trainkit.engine.step import SimpleTrainer
from trainkit.solver import LRMultiplier

HALVE = [{"NAME": "Exponential", "GAMMA": 0.5}]
LINEAR = [{"NAME": "Linear", "START_FACTOR": 0.25}]


def make(hook, optimizer=None, read=lambda group: group["weight_decay"]):
    """A trainer with the hook, and what ``read`` finds in the first group at each update."""
    optimizer, used = optimizer or sgd(Weight(), weight_decay=0.5, momentum=0.5), []
    trainer = SimpleTrainer(Weight(), [torch.tensor(1.0)], optimizer)
    note = CallbackHook(after_backward=lambda trainer: used.append(read(optimizer.param_groups[0])))
    trainer.register_hooks([hook, note])
    return trainer, used


def test_the_first_update_uses_the_first_value_and_each_value_is_stored_with_its_iteration():
    trainer, used = make(ParamScheduler("weight_decay", LINEAR))
    trainer.train(0, 4)
    assert used == [0.125, 0.25, 0.375, 0.5]
    assert trainer.storage.history("weight_decay").values() == list(
        zip(used, range(4), strict=True)
    )
    assert trainer.storage.smoothing_hints()["weight_decay"] is False


def test_any_number_of_the_groups_can_be_scheduled():
    def adam():
        return torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.5, betas=(0.5, 0.75))

    for param, optimizer, key, expected in [
        ("momentum", sgd(Weight(), momentum=0.5), "momentum", [0.5, 0.25, 0.125]),
        ("momentum", adam(), "betas", [(0.5, 0.75), (0.25, 0.75), (0.125, 0.75)]),
        ("betas.0", adam(), "betas", [(0.5, 0.75), (0.25, 0.75), (0.125, 0.75)]),
        ("betas.1", adam(), "betas", [(0.5, 0.75), (0.5, 0.375), (0.5, 0.1875)]),
        ("lr", adam(), "lr", [0.5, 0.25, 0.125]),
    ]:
        trainer, used = make(
            ParamScheduler(param, HALVE), optimizer, lambda group, key=key: group[key]
        )
        trainer.train(0, 3)
        assert used == expected, param


def test_groups_start_from_their_own_values_and_the_largest_is_stored():
    groups = [
        {"params": [nn.Parameter(torch.ones(1)) for _ in range(n)], "weight_decay": n / 8}
        for n in (1, 2)
    ]
    trainer, _ = make(ParamScheduler("weight_decay", HALVE), torch.optim.SGD(groups, lr=0.1))
    trainer.train(0, 2)
    values = [
        (group["weight_decay"], group["initial_weight_decay"])
        for group in trainer.optimizer.param_groups
    ]
    assert values == [(1 / 16, 1 / 8), (2 / 16, 2 / 8)]
    assert trainer.storage.history("weight_decay").values() == [(2 / 8, 0), (2 / 16, 1)]


def test_a_run_in_parts_has_one_schedule_if_its_length_is_given():
    def run(*parts, **kwargs):
        trainer, used = make(ParamScheduler("weight_decay", LINEAR, **kwargs))
        for part in parts:
            trainer.train(*part)
        return used

    assert run((0, 2), (2, 4), max_iter=4) == run((0, 4)) == [0.125, 0.25, 0.375, 0.5]
    assert run((0, 2), (2, 4)) == [0.125, 0.5, 0.375, 0.5]


@pytest.mark.parametrize("param", ["weight_decy", "nesterov", "betas.0"])
def test_a_field_that_no_group_has_is_an_error_before_the_first_step(param):
    trainer, used = make(ParamScheduler(param, HALVE))
    with pytest.raises(
        ValueError, match=rf"no parameter group has '{param}'; accepted: .*'weight_decay'"
    ):
        trainer.train(0, 1)
    assert used == []


CONSTANT = ConstantParamScheduler(1.0)


def on_plateau(values, schedule=CONSTANT, lr=0.7, period=1, optimizer=None, **kwargs):
    """A trainer that is evaluated every ``period`` iterations, and the learning rate of each iteration."""
    results, used = iter(values), []
    optimizer = optimizer or sgd(Weight(), lr=lr)

    def step(iter):
        optimizer.step()
        used.append(optimizer.param_groups[0]["lr"])

    trainer = Steps(step=step)
    trainer.optimizer, trainer.scheduler = optimizer, LRMultiplier(optimizer, schedule, 8)
    kwargs = {"mode": "min", "patience": 0, **kwargs}
    evaluate = EvalHook(period, lambda: {"loss": next(results)})
    trainer.register_hooks([LRScheduler(), evaluate, ReduceOnPlateau(period, "loss", **kwargs)])
    return trainer, used


def torchs(values, lr=0.7, **kwargs):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = lr_scheduler.ReduceLROnPlateau(
        optimizer, **{"mode": "min", "patience": 0, "eps": 0.0, **kwargs}
    )
    lrs = [lr]
    for value in values:
        scheduler.step(value)
        lrs.append(optimizer.param_groups[0]["lr"])
    return lrs


OPTIONS = [
    {},
    {"patience": 2},
    {"patience": 1, "cooldown": 2, "factor": 0.3},
    {"threshold": 0.2, "patience": 1},
    {"threshold": 0.1, "threshold_mode": "abs"},
    {"mode": "max", "patience": 1, "factor": 0.9},
    {"mode": "max", "threshold": 0.15, "patience": 1, "cooldown": 1},
    {"mode": "max", "threshold": 0.15, "threshold_mode": "abs", "patience": 1},
]


def test_the_rates_are_those_of_torchs_scheduler_bit_by_bit():
    draw = random.Random(3)
    values = [
        math.nan if draw.random() < 0.1 else draw.uniform(0.1, 1.0) * 0.97**i for i in range(60)
    ]
    for options in OPTIONS:
        trainer, used = on_plateau(values, **options)
        trainer.train(0, 60)
        assert used == torchs(values, **options)[:60], options
        assert len(set(used)) > 3
        assert (
            used != torchs(values, **{**options, "patience": options.get("patience", 0) + 1})[:60]
        )


def two_groups(lrs):
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    return torch.optim.SGD(groups)


@pytest.mark.parametrize("min_lr", [0.0, 0.05, [0.2, 0.001], (0.0, 0.03)], ids=str)
def test_each_group_has_the_lower_bound_of_torchs_scheduler(min_lr):
    lrs, values = (0.7, 0.09), [1.0] * 12
    optimizer, found = two_groups(lrs), []
    trainer, _ = on_plateau(values, optimizer=optimizer, factor=0.5, min_lr=min_lr)
    note = CallbackHook(
        before_step=lambda trainer: found.append([group["lr"] for group in optimizer.param_groups])
    )
    trainer.register_hooks([note])
    trainer.train(0, 12)

    optimizer, expected = two_groups(lrs), []
    bounds = [*min_lr] if isinstance(min_lr, tuple) else min_lr
    scheduler = lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, min_lr=bounds, eps=0.0
    )
    for value in values:
        expected.append([group["lr"] for group in optimizer.param_groups])
        scheduler.step(value)
    assert found == [pytest.approx(rates, rel=1e-12) for rates in expected]
    assert (found[-1] == found[-2]) is (min_lr not in (0.0, (0.0, 0.03)))


def test_a_lower_bound_does_not_raise_a_schedule_that_is_lower_itself():
    line = LinearParamScheduler(1.0, 0.0)
    trainer, used = on_plateau([1.0] * 8, line, lr=1.0, factor=0.5, min_lr=0.4)
    trainer.train(0, 8)
    # the line, at once lowered to the bound, until it is below the bound itself
    assert used == pytest.approx([1.0, 0.875, 0.4, 0.4, 0.4, 0.375, 0.25, 0.125])


def test_a_resumed_run_has_the_rate_at_the_lower_bound_at_once():
    options = {"lr": 1.0, "factor": 0.5, "min_lr": 0.4}
    first, used = on_plateau([1.0] * 4, **options)
    first.train(0, 4)
    state = {**first.state_dict(), "optimizer": first.optimizer.state_dict()}
    second, rest = on_plateau([1.0] * 4, **options)
    second.load_state_dict(state)
    second.optimizer.load_state_dict(state["optimizer"])
    second.train(second.next_iter, 8)
    # halved after the second value, then at the bound
    assert used + rest == pytest.approx([1.0, 1.0, 0.5, 0.4, 0.4, 0.4, 0.4, 0.4])


def test_a_wrong_lower_bound_is_an_error():
    for wrong in (-0.1, [0.1, math.nan], "low"):
        with pytest.raises(ValueError, match="min_lr must be a number in"):
            ReduceOnPlateau(1, "loss", "min", min_lr=wrong)
    trainer, _ = on_plateau([1.0], optimizer=two_groups((0.7, 0.1)), min_lr=[0.1])
    with pytest.raises(ConfigError, match="min_lr has 1 numbers, but the optimizer has 2 param"):
        trainer.train(0, 1)


def test_the_factor_multiplies_the_schedule_which_goes_on():
    trainer, used = on_plateau(
        [3.0, 3.0, 2.0, 2.0], LinearParamScheduler(1.0, 0.0), lr=1.0, period=2, factor=0.5
    )
    trainer.train(0, 8)
    # halved after four iterations; the last evaluation is that of the end
    assert used == [1.0, 0.875, 0.75, 0.625, 0.25, 0.1875, 0.125, 0.0625]
    assert trainer.storage.history("lr").values() == list(zip(used, range(8), strict=True))


def test_a_new_run_begins_anew():
    values = [3.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.0]
    trainer, used = on_plateau(values, patience=1, cooldown=1, factor=0.5)
    trainer.train(0, 9)
    assert used == [0.7] * 3 + [0.35] * 3 + [0.175] * 3
    anew, again = on_plateau(values, patience=1, cooldown=1, factor=0.5)
    anew.load_state_dict(trainer.state_dict())
    anew.train(0, 9)
    assert again == used
