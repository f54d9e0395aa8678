import pytest
import torch
from fvcore.common.param_scheduler import (
    CompositeParamScheduler,
    ConstantParamScheduler,
    CosineParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    PolynomialDecayParamScheduler,
    StepWithFixedGammaParamScheduler,
)
from torch import nn
from torch.optim import lr_scheduler

from tests.engine.tiny import Weight, sgd
from trainkit.engine.amp import AMPTrainer
from trainkit.engine.hooks import CallbackHook, LRScheduler
from trainkit.engine.step import SimpleTrainer
from trainkit.solver import LRFunction, LRMultiplier

# older versions of torch step the parts of a SequentialLR in a way that they deprecate
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")

ITERS = 8

PARAM_SCHEDULERS = [
    (ConstantParamScheduler(0.5), 0.5),
    (CosineParamScheduler(1.0, 0.25), 0.25),
    (MultiStepParamScheduler([1.0, 0.5, 0.25], num_updates=ITERS, milestones=[2, 5]), 0.25),
    (PolynomialDecayParamScheduler(1.0, 2), 0.0),
    (StepWithFixedGammaParamScheduler(1.0, 3, 0.5, ITERS), 0.125),
    (
        CompositeParamScheduler(
            [ConstantParamScheduler(1.0), LinearParamScheduler(1.0, 0.5)], [0.5, 0.5], ["rescaled", "rescaled"]
        ),
        0.5,
    ),
]


def make(scheduler, trainer_class=SimpleTrainer, **kwargs):
    """A trainer with base learning rate 0.5, and the learning rates of its updates."""
    model = Weight()
    optimizer = sgd(model, lr=0.5)
    trainer = trainer_class(model, [torch.tensor(1.0)], optimizer, **kwargs)
    trainer.scheduler = scheduler(optimizer) if callable(scheduler) and isinstance(scheduler, type(make)) else scheduler
    used = []
    note = CallbackHook(after_backward=lambda trainer: used.append((optimizer.param_groups[0]["lr"], trainer.iter)))
    trainer.register_hooks([LRScheduler(), note])
    return trainer, used


@pytest.mark.parametrize(("schedule", "last"), PARAM_SCHEDULERS, ids=lambda value: type(value).__name__)
def test_every_schedule_of_fvcore_is_followed_and_keeps_its_last_value(schedule, last):
    trainer, used = make(schedule)
    trainer.train(0, ITERS)
    assert used == [(0.5 * schedule(iter / ITERS), iter) for iter in range(ITERS)]
    assert trainer.storage.history("lr").values() == used
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * last)
    assert trainer.storage.smoothing_hints()["lr"] is False


TORCH_SCHEDULERS = {
    "milestones": (
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5),
        [0.5] * 2 + [0.25] * 3 + [0.125] * 3,
    ),
    "lambda": (
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda iter: 1 - iter / 8),
        [0.5 - iter / 16 for iter in range(8)],
    ),
    "sequence": (
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer, 0.5, 9), lr_scheduler.StepLR(optimizer, 2, gamma=0.5)],
            milestones=[4],
        ),
        [0.25] * 4 + [0.5] * 2 + [0.25] * 2,
    ),
}


@pytest.mark.parametrize("name", TORCH_SCHEDULERS)
def test_a_torch_scheduler_is_stepped_once_per_iteration(name):
    scheduler, expected = TORCH_SCHEDULERS[name]
    trainer, used = make(scheduler)
    trainer.train(0, ITERS)
    assert used == list(zip(expected, range(ITERS), strict=True))
    assert trainer.storage.history("lr").values() == used


def test_a_fresh_optimizer_can_begin_in_the_middle_of_a_schedule():
    trainer, used = make(LinearParamScheduler(1.0, 0.0))
    trainer.train(6, 8)
    assert used == [(0.125, 6), (0.0625, 7)]


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: LRMultiplier(optimizer, LinearParamScheduler(1.0, 0.0), 8),
        lambda optimizer: LRFunction(optimizer, lambda t, base: base * (1 - t / 8)),
    ],
    ids=["multiplier", "function"],
)
def test_a_scheduler_that_is_a_function_of_the_iteration_follows_the_trainer_to_any_iteration(scheduler):
    trainer, used = make(scheduler)
    trainer.train(0, 3)
    trainer.train(3, 5)
    trainer.train(0, 2)
    trainer.train(6, 8)
    assert used == [(0.5 - iter / 16, iter) for iter in (0, 1, 2, 3, 4, 0, 1, 6, 7)]


@pytest.mark.parametrize("scheduler", [LinearParamScheduler(1.0, 0.0), TORCH_SCHEDULERS["lambda"][0]])
def test_a_first_update_that_the_scaler_skips_shifts_nothing_and_warns_of_nothing(scheduler):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    trainer, used = make(scheduler, AMPTrainer, grad_scaler=scaler)
    trainer.data_loader = [torch.tensor(4.0)]
    trainer.train(0, 8)
    assert [lr for lr, _ in used] == [0.5 - iter / 16 for iter in range(8)]
    assert trainer.model.weight.item() == 1.0 - 4.0 * sum(lr for lr, _ in used[1:])


def lr_shown(groups):
    optimizer = torch.optim.SGD(groups, lr=1.0)
    trainer = SimpleTrainer(Weight(), [torch.tensor(1.0)], optimizer)
    trainer.register_hooks([LRScheduler(optimizer, ConstantParamScheduler(1.0))])
    trainer.train(0, 1)
    return trainer.storage.latest()["lr"][0]


def group(lr, count):
    return {"lr": lr, "params": [nn.Parameter(torch.zeros(1)) for _ in range(count)]}


def test_the_lr_shown_is_that_of_the_largest_group_or_else_the_most_common_one():
    assert lr_shown([group(0.1, 1), group(0.2, 3), group(0.4, 2)]) == 0.2
    assert lr_shown([group(0.1, 1), group(0.2, 1), group(0.4, 1), group(0.2, 1)]) == 0.2


def test_optimizer_and_scheduler_can_be_given():
    model = Weight()
    optimizer = sgd(model, lr=0.5)
    trainer = SimpleTrainer(Weight(), [torch.tensor(1.0)], sgd(Weight(), lr=9.0))
    trainer.register_hooks([LRScheduler(optimizer, CosineParamScheduler(1.0, 0.0))])
    trainer.train(0, 2)
    assert [lr for lr, _ in trainer.storage.history("lr").values()] == pytest.approx([0.5, 0.25])


def test_a_rate_that_is_a_tensor_is_stored_as_it_was_in_each_iteration(asynchronous):
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], optimizer, async_write_metrics=asynchronous)
    trainer.register_hooks([LRScheduler(optimizer, LinearParamScheduler(1.0, 0.0))])
    trainer.train(0, 8)
    assert trainer.storage.history("lr").values() == [(0.5 * (1 - iter / 8), iter) for iter in range(8)]
