import math
import random

import torch
from fvcore.common.param_scheduler import ConstantParamScheduler, LinearParamScheduler
from torch import nn
from torch.optim import lr_scheduler

from tests.engine.tiny import Steps, Weight, sgd
from trainkit.engine.hooks import EvalHook, LRScheduler, ReduceOnPlateau
from trainkit.solver import LRMultiplier

CONSTANT = ConstantParamScheduler(1.0)


def make(values, schedule=CONSTANT, lr=0.7, period=1, **kwargs):
    """A trainer that is evaluated every ``period`` iterations, and the learning rate of each iteration."""
    results, used = iter(values), []
    optimizer = sgd(Weight(), lr=lr)

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
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, **{"mode": "min", "patience": 0, "eps": 0.0, **kwargs})
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
    values = [math.nan if draw.random() < 0.1 else draw.uniform(0.1, 1.0) * 0.97**i for i in range(60)]
    for options in OPTIONS:
        trainer, used = make(values, **options)
        trainer.train(0, 60)
        assert used == torchs(values, **options)[:60], options
        assert len(set(used)) > 3
        assert used != torchs(values, **{**options, "patience": options.get("patience", 0) + 1})[:60]


def test_the_factor_multiplies_the_schedule_which_goes_on():
    trainer, used = make([3.0, 3.0, 2.0, 2.0], LinearParamScheduler(1.0, 0.0), lr=1.0, period=2, factor=0.5)
    trainer.train(0, 8)
    factors = [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]  # the last evaluation is that of the end
    assert used == [factor * (1 - iter / 8) for iter, factor in enumerate(factors)]
    assert trainer.storage.history("lr").values() == list(zip(used, range(8), strict=True))


def test_a_new_run_begins_anew():
    values = [3.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.0]
    trainer, used = make(values, patience=1, cooldown=1, factor=0.5)
    trainer.train(0, 9)
    assert used == [0.7] * 3 + [0.35] * 3 + [0.175] * 3
    anew, again = make(values, patience=1, cooldown=1, factor=0.5)
    anew.load_state_dict(trainer.state_dict())
    anew.train(0, 9)
    assert again == used
