import pytest
import torch
from fvcore.common.param_scheduler import (
    CompositeParamScheduler,
    ConstantParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
)
from torch import nn
from torch.optim import lr_scheduler

from tests.engine.tiny import Weight, sgd
from trainkit.config import ConfigError
from trainkit.engine.amp import AMPTrainer
from trainkit.engine.hooks import CallbackHook, LRScheduler
from trainkit.engine.step import SimpleTrainer
from trainkit.solver import LRFunction, LRMultiplier

ITERS = 8
HALVES = [ConstantParamScheduler(1.0), LinearParamScheduler(1.0, 0.5)]


def make(scheduler, trainer_class=SimpleTrainer, lr=0.5, **kwargs):
    """A trainer with base learning rate 0.5, and the learning rates of its updates."""
    model = Weight()
    optimizer = sgd(model, lr=lr)
    trainer = trainer_class(model, [torch.tensor(1.0)], optimizer, **kwargs)
    trainer.scheduler = (
        scheduler(optimizer)
        if callable(scheduler) and isinstance(scheduler, type(make))
        else scheduler
    )
    used = []
    note = CallbackHook(
        after_backward=lambda trainer: used.append((optimizer.param_groups[0]["lr"], trainer.iter))
    )
    trainer.register_hooks([LRScheduler(), note])
    return trainer, used


@pytest.mark.parametrize(
    ("schedule", "rates", "last"),
    [
        (
            MultiStepParamScheduler([1.0, 0.5, 0.25], num_updates=ITERS, milestones=[2, 5]),
            [0.5, 0.5, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125],
            0.125,
        ),
        (
            CompositeParamScheduler(HALVES, [0.5, 0.5], ["rescaled", "rescaled"]),
            [0.5, 0.5, 0.5, 0.5, 0.5, 0.4375, 0.375, 0.3125],
            0.25,
        ),
    ],
    ids=["steps", "composite"],
)
def test_a_schedule_of_fvcore_is_followed_and_keeps_its_last_value(schedule, rates, last):
    trainer, used = make(schedule)
    trainer.train(0, ITERS)
    assert used == [(rate, iter) for iter, rate in enumerate(rates)]
    assert trainer.storage.history("lr").values() == used
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(last)
    assert trainer.storage.smoothing_hints()["lr"] is False


def test_a_torch_scheduler_is_stepped_once_per_iteration():
    trainer, used = make(lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 8))
    trainer.train(0, ITERS)
    assert used == [(0.5 - t / 16, t) for t in range(ITERS)]
    assert trainer.storage.history("lr").values() == used
    with pytest.raises(
        TypeError, match="ReduceLROnPlateau needs a metric; use the hook ReduceOnPlateau"
    ):
        make(lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer))[0].train(0, ITERS)


@pytest.mark.parametrize(
    "scheduler",
    [
        LinearParamScheduler(1.0, 0.0),
        lambda optimizer: LRMultiplier(optimizer, LinearParamScheduler(1.0, 0.0), 8),
        lambda optimizer: LRFunction(optimizer, lambda t, base: base * (1 - t / 8)),
    ],
    ids=["schedule", "multiplier", "function"],
)
def test_a_function_of_the_iteration_follows_the_trainer_to_any_iteration(scheduler):
    trainer, used = make(scheduler)
    for start_iter, max_iter in ((0, 8), (6, 8), (0, 8)):
        trainer.train(start_iter, max_iter)
    assert used == [(0.5 - iter / 16, iter) for iter in (*range(8), 6, 7, *range(8))]


def test_a_first_update_that_the_scaler_skips_shifts_nothing():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    trainer, used = make(LinearParamScheduler(1.0, 0.0), AMPTrainer, grad_scaler=scaler)
    trainer.data_loader = [torch.tensor(4.0)]
    trainer.train(0, 8)
    assert [lr for lr, _ in used] == [0.5 - iter / 16 for iter in range(8)]
    assert trainer.model.weight.item() == 1.0 - 4.0 * sum(lr for lr, _ in used[1:])


@pytest.mark.parametrize(
    ("rates", "sizes", "shown"),
    [
        ([0.1, 0.2], [1, 3], "group 2 of 2"),
        ([0.1, 0.2, 0.4, 0.2], [1, 1, 1, 1], "group 2 of 4"),
    ],
)
def test_the_lr_shown_is_that_of_the_largest_group_or_else_the_most_common_one(
    rates, sizes, shown, caplog
):
    caplog.set_level("INFO")
    parameters = [
        {"lr": lr, "params": [nn.Parameter(torch.zeros(1)) for _ in range(size)]}
        for lr, size in zip(rates, sizes, strict=True)
    ]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    trainer = SimpleTrainer(Weight(), [torch.tensor(1.0)], optimizer)
    hook = LRScheduler(optimizer, given := ConstantParamScheduler(1.0))  # both can be given
    trainer.register_hooks([hook])
    assert hook.scheduler is given
    trainer.train(0, 1)
    assert isinstance(hook.scheduler, LRMultiplier)
    assert trainer.storage.latest()["lr"][0] == 0.2
    assert [text for text in caplog.messages if text.endswith(shown)]


def test_a_rate_that_is_a_tensor_is_stored_as_it_was_in_each_iteration(asynchronous):
    trainer, _ = make(
        LinearParamScheduler(1.0, 0.0), lr=torch.tensor(0.5), async_write_metrics=asynchronous
    )
    trainer.train(0, 8)
    rates = [0.5, 0.4375, 0.375, 0.3125, 0.25, 0.1875, 0.125, 0.0625]
    assert trainer.storage.history("lr").values() == [(rate, i) for i, rate in enumerate(rates)]


def with_a_later_group(make_scheduler, added, start=2):
    """Base rate 0.5; in iteration ``start`` a hook adds a parameter to the optimizer."""
    model = Weight()
    later = nn.Parameter(torch.ones(()))
    optimizer = sgd(model, lr=0.5)
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], optimizer)
    trainer.scheduler = make_scheduler(optimizer)
    rates = []

    def add(trainer):
        if trainer.iter == start:
            optimizer.add_param_group({"params": [later], **added})
        rates.append([group["lr"] for group in optimizer.param_groups])

    trainer.register_hooks([LRScheduler(), CallbackHook(before_step=add)])
    return trainer, rates


@pytest.mark.parametrize(
    ("added", "base", "later"),
    [
        ({"lr": 0.25}, 0.25, [0.15625, 0.125]),
        ({"lr": 0.1, "initial_lr": 0.125}, 0.125, [0.078125, 0.0625]),
        ({}, 0.5, [0.3125, 0.25]),
    ],
)
def test_the_rate_of_a_group_that_is_added_later_is_its_base_rate_times_the_schedule(
    added, base, later, caplog
):
    caplog.set_level("INFO")
    trainer, rates = with_a_later_group(
        lambda optimizer: LRMultiplier(optimizer, lambda where: 1 - where, ITERS), added
    )
    trainer.train(0, 5)
    assert rates[:2] == [[0.5], [0.4375]]
    assert rates[2] == [0.375, added.get("lr", 0.5)]  # as it was given, until the next iteration
    assert rates[3] == [0.3125, later[0]]
    assert rates[4] == [0.25, later[1]]
    assert f"their lr, [{base}], are base rates, which the schedule multiplies" in caplog.text


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: 0.5),
        lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda t: 0.5),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, 10, cycle_momentum=False),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    ],
)
def test_a_scheduler_that_has_no_rate_for_a_later_group_is_an_error_that_names_it(make_scheduler):
    trainer, _ = with_a_later_group(make_scheduler, {"lr": 0.25})
    name = type(trainer.scheduler).__name__
    text = f"had 1 parameter groups when training started, and has 2 now: {name} has no rate for"
    with pytest.raises(ValueError, match=text):
        trainer.train(0, 5)
    assert trainer.iter == 2


def test_a_scheduler_of_torch_that_multiplies_what_is_there_takes_a_later_group():
    trainer, rates = with_a_later_group(
        lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5), {"lr": 0.25}
    )
    trainer.train(0, 5)
    assert rates[2:] == [[0.5, 0.25], [0.25, 0.125], [0.25, 0.125]]


def test_groups_in_another_order_are_refused_for_a_scheduler_that_keeps_rates_by_their_places():
    def make(*rates):
        groups = [{"params": [nn.Parameter(torch.ones(()))], "lr": lr} for lr in rates]
        optimizer = torch.optim.SGD(groups)
        trainer = SimpleTrainer(Weight(), [torch.tensor(1.0)], optimizer)
        trainer.scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: 0.5)
        trainer.register_hooks([LRScheduler()])
        return trainer

    trainer = make(0.5, 0.25)
    trainer.scheduler.load_state_dict(make(0.25, 0.5).scheduler.state_dict())
    with pytest.raises(ConfigError, match=r"LambdaLR keeps its rates by .* \[0.25, 0.5\], the gr"):
        trainer.train(0, 1)
