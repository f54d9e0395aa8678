"""Mixed precision: what is scaled, what is skipped, and what goes on."""

import math

import pytest
import torch
from torch import nn

from tests.engine.tiny import AfterStep, PlainOptimizer, Regression, Weight, batches, scalars, sgd
from trainkit.config import ConfigError
from trainkit.engine.amp import AMPTrainer, fixed_scaler
from trainkit.engine.hooks import CallbackHook, PeriodicWriter
from trainkit.solver import GradientClipper


@pytest.mark.parametrize(("precision", "scaled"), [(torch.float16, True), (torch.bfloat16, False)])
def test_the_forward_pass_is_under_autocast_and_only_float16_is_scaled(precision, scaled):
    seen = []

    def compute(weight, batch):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return weight * batch

    model = Weight(compute)
    trainer = AMPTrainer(model, [torch.tensor(2.0)], sgd(model, lr=0.5), precision=precision)
    trainer.train(0, 1)
    assert seen == [(True, precision)]
    assert trainer.grad_scaler.is_enabled() is scaled
    assert model.weight.item() == 0.0
    assert not torch.is_autocast_enabled("cpu")


def amp_trainer_with_overflows(values, **kwargs):
    """Its gradient in an iteration is the next value; a loss is as finite as its value."""
    model = Weight()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    data = [torch.tensor(value) for value in values]
    return AMPTrainer(model, data, sgd(model, lr=2.0**-10), grad_scaler=scaler, **kwargs)


def test_float16_overflows_now_and_then_are_skipped_updates(asynchronous):
    trainer = amp_trainer_with_overflows(
        ([math.inf] * 24 + [1.0]) * 2, async_write_metrics=asynchronous
    )
    trainer.register_hooks([PeriodicWriter([], period=20)])
    trainer.train(0, 50)
    assert trainer.status == "finished"
    assert trainer.model.weight.item() == 1.0 - 2 * 2.0**-10
    assert [iter for _, iter in trainer.storage.history("total_loss").values()] == [24, 49]
    skipped = [value for value, _ in trainer.storage.history("skipped_updates").values()]
    assert skipped == [*range(1, 25), 24, *range(25, 49), 48]
    trainer = amp_trainer_with_overflows([1.0], gather_metric_period=3)
    trainer.train(0, 7)
    assert [iter for _, iter in trainer.storage.history("skipped_updates").values()] == [2, 5]


def test_many_float16_overflows_in_a_row_are_a_failure(asynchronous):
    trainer = amp_trainer_with_overflows([1.0] + [math.inf] * 49, async_write_metrics=asynchronous)
    with pytest.raises(
        FloatingPointError,
        match=r"in iteration 25: {'total_loss': inf}; this is update 25 in a row",
    ):
        trainer.train(0, 50)
    assert trainer.status == "failed"
    assert trainer.model.weight.item() == 1.0 - 2.0**-10
    with pytest.raises(FloatingPointError, match="in iteration 0.*update 1 in a row"):
        amp_trainer_with_overflows([math.inf], max_non_finite_in_row=1).train(0, 1)


class HalfLinear(nn.Module):
    """One weight that starts at 1; a batch is the gradient, which passes through float16 times the scale."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, batch):
        return (self.linear(torch.ones(1)).float() * batch).sum()


GRADIENTS = (1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0)  # the third times 2**15 is beyond float16
LR = 2.0**-13  # 1 - LR is no number of float16


def scripted_overflow(optimizer_kwargs=None, **kwargs):
    """What the run was: by iteration the gradient in after_backward and the weight after the update; the scalars."""
    model, gradients, found = HalfLinear(), [], []
    data = [torch.tensor(gradient) for gradient in GRADIENTS]
    trainer = AMPTrainer(model, data, sgd(model, lr=LR, **(optimizer_kwargs or {})), **kwargs)
    note = {
        "after_backward": lambda trainer: gradients.append(model.linear.weight.grad.item()),
        "after_step": lambda trainer: found.append((1.0 - model.linear.weight.item()) / LR),
    }
    trainer.register_hooks([CallbackHook(**note)])
    trainer.train(0, 7)
    assert model.linear.weight.dtype == torch.float32
    stored = scalars(trainer)
    smoothed = [
        name
        for name, smooth in trainer.storage.smoothing_hints().items()
        if smooth and name in stored
    ]
    assert smoothed == ["total_loss"]
    assert [value for value, _ in stored.pop("total_loss")] == pytest.approx(GRADIENTS, rel=0.01)
    return (
        gradients,
        found,
        {name: [value for value, _ in values] for name, values in stored.items()},
    )


def dynamic_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=3)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_its_update_and_halves_the_dynamic_scale(fused):
    gradients, updates, stored = scripted_overflow(
        {"fused": fused},
        grad_scaler=dynamic_scaler(),
        log_grad_scaler=True,
        async_write_metrics=fused,
    )
    assert gradients == [1.0, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0]
    assert updates == [1.0, 2.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert stored == {
        "skipped_updates": [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        "[metric]grad_scaler": [2.0**15] * 3 + [2.0**14] * 3 + [2.0**15],
    }


def test_a_fixed_scale_stays_as_it_is():
    _, updates, stored = scripted_overflow(
        grad_scaler=fixed_scaler("cpu", 2.0**15), log_grad_scaler=True
    )
    assert updates == [1.0, 2.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert stored["[metric]grad_scaler"] == [2.0**15] * 7
    _, updates, stored = scripted_overflow(grad_scaler=fixed_scaler("cpu", 2.0**13))
    assert updates == [1.0, 2.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert stored == {"skipped_updates": [0.0] * 7}


def test_one_overflown_micro_batch_skips_the_update_of_its_window_once():
    model, updates = HalfLinear(), []
    data = [torch.tensor(gradient) for gradient in (1.0, 3.0, 1.0, 8.0, 1.0)]
    options = {"accumulation_steps": 2, "clip_gradients": GradientClipper("norm", 1.5)}
    trainer = AMPTrainer(model, data, sgd(model, lr=LR), grad_scaler=dynamic_scaler(), **options)
    trainer.register_hooks(
        [AfterStep(lambda trainer: updates.append((1.0 - model.linear.weight.item()) / LR))]
    )
    trainer.train(0, 3)
    # the gradients are 2, clipped, then infinite, then 1 of a window of one
    assert updates == pytest.approx([1.5, 1.5, 2.5], rel=1e-5)
    assert updates[1] == updates[0]
    stored = scalars(trainer)
    assert [value for value, _ in stored["grad_norm"]] == [2.0, math.inf, 1.0]
    assert trainer.storage.latest_with_smoothing_hint()["grad_norm"] == (1.5, 2)
    assert trainer.storage.counts_left_out() == {"grad_norm": 1}
    assert [value for value, _ in stored["skipped_updates"]] == [0.0, 1.0, 1.0]


def weight_after_overflow(optimizer_kwargs, wrap=lambda optimizer: optimizer):
    model = Weight()
    optimizer = wrap(sgd(model, lr=0.25, momentum=0.5, **optimizer_kwargs))
    data = [torch.tensor(value) for value in (math.inf, 1.0, 1.0)]
    AMPTrainer(
        model, data, optimizer, grad_scaler=torch.amp.GradScaler("cpu", init_scale=4.0)
    ).train(0, 3)
    return model.weight.item()


def test_fused_sgd_has_clean_momentum_after_an_overflow_in_its_first_step():
    # one update is skipped, then the momentum is 1, then 1.5
    expected = 1.0 - 0.25 * 1.0 - 0.25 * 1.5
    # memory that is not initialised is NaN, and not by chance zero
    torch.use_deterministic_algorithms(True)
    try:
        assert weight_after_overflow({"foreach": False}) == expected
        assert weight_after_overflow({"fused": True}) == expected
        assert weight_after_overflow({"fused": True, "nesterov": True}) == weight_after_overflow(
            {"nesterov": True}
        )
        assert weight_after_overflow({"fused": True}, wrap=PlainOptimizer) == expected
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_scaler_goes_on_from_its_state(caplog):
    first = amp_trainer_with_overflows([math.inf, 1.0])
    first.train(0, 2)
    second = amp_trainer_with_overflows([1.0, 1.0])
    second.load_state_dict(first.state_dict())
    assert second.grad_scaler.get_scale() == 8.0
    assert second.grad_scaler.state_dict() == first.grad_scaler.state_dict()
    second.train(2, 3)
    assert second.storage.latest()["skipped_updates"] == (1.0, 2)
    second.load_state_dict(
        {
            key: value
            for key, value in first.state_dict().items()
            if key not in ("non_finite", "grad_scaler")
        }
    )
    [text] = caplog.messages
    assert "no gradient scale" in text
    assert text.endswith(" 8")
    second.train(2, 3)  # detectron2 does not count
    assert second.storage.latest()["skipped_updates"] == (0.0, 2)


def test_a_run_that_failed_with_unscaled_gradients_goes_on():
    trainer, errors = amp_trainer_with_overflows([1.0]), [RuntimeError("once")]

    def fail_once(trainer):
        if errors:
            raise errors.pop()

    trainer.register_hooks([CallbackHook(after_backward=fail_once)])
    with pytest.raises(RuntimeError, match="once"):
        trainer.train(0, 2)
    trainer.train(0, 2)
    assert trainer.model.weight.item() == 1.0 - 2 * 2.0**-10


def test_what_a_scaler_cannot_do_is_refused():
    class OnTwoDevices(Weight):
        device_ids = (0, 1)

    for model in (nn.DataParallel(Regression()), OnTwoDevices()):
        with pytest.raises(
            ValueError, match="one device per process; use create_ddp_model instead of DataParallel"
        ):
            AMPTrainer(model, batches(1), sgd(model))
    model = Weight()
    optimizer = sgd(model, momentum=0.5, dampening=0.1, fused=True)
    with pytest.raises(ConfigError, match="set fused=False"):
        AMPTrainer(model, [], optimizer)
    AMPTrainer(model, [], optimizer, precision=torch.bfloat16)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_without_any_gradient_in_the_optimizer_says_what_happened(fused):
    class Switching(Weight):
        """From the second batch on, the loss depends on another parameter."""

        def __init__(self):
            super().__init__()
            self.other = nn.Parameter(torch.ones(()))

        def forward(self, batch):
            return (self.weight if batch > 0 else self.other) * 2.0

    model = Switching()
    optimizer = torch.optim.SGD([model.weight], 0.1, fused=fused)
    trainer = AMPTrainer(model, [torch.tensor(1.0), torch.tensor(-1.0)], optimizer)
    with pytest.raises(RuntimeError, match="in iteration 1 no parameter of the optimizer has a gr"):
        trainer.train(0, 2)
    assert model.other.grad is not None
