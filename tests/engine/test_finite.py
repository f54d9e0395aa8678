"""What is not finite: found, judged by the policy, and kept out of the weights and out of what is saved."""

import logging
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda import allow_waiting, forbid_waiting, needs_cuda
from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, PlainOptimizer, Regression, Weight, batches, scalars, sgd
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.engine.amp import AMPTrainer
from trainkit.engine.finite import FiniteCheck, non_finite_names
from trainkit.engine.hooks import CallbackHook, PeriodicWriter
from trainkit.engine.step import SimpleTrainer
from trainkit.solver import GradientClipper
from trainkit.utils.events import EventStorage

ADVICE = "Lower the learning rate, clip gradients"


# ---------------------------------------------------------------------- gradients


def optimizer_of(*gradients):
    parameters = []
    for gradient in gradients:
        parameters.append(
            nn.Parameter(torch.zeros(3, 3) if gradient is None else torch.zeros_like(gradient.to_dense()))
        )
        parameters[-1].grad = gradient
    return torch.optim.SGD(parameters, lr=0.1)


def is_marked(*gradients):
    check = FiniteCheck("raise", 1)
    check.flag_update(nn.Identity(), optimizer_of(*gradients), torch.zeros(()))
    assert (check.flag.dtype, check.flag.shape) == (torch.float32, ())
    return bool(check.flag)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 40, 99])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_one_value_that_is_not_finite_is_found_in_gradients_of_every_type(dtype, place, value):
    gradient = torch.full((100,), 2.0, dtype=dtype)
    others = [None, torch.ones(4), torch.ones(4, dtype=torch.float64)]
    assert not is_marked(*others, gradient)
    gradient[place] = value
    assert is_marked(*others, gradient)
    assert is_marked(gradient, *others)


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_gradients_are_looked_at_under_any_default_dtype(dtype, policy):
    torch.set_default_dtype(dtype)
    try:
        model = Regression()
        data = [(x.to(dtype), y.to(dtype)) for x, y in batches(4)]
        trainer = SimpleTrainer(model, data, sgd(model), non_finite=policy)
        trainer.train(0, 4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert trainer.status == "finished"


def test_a_complex_gradient_is_looked_at_in_both_parts():
    assert is_marked(torch.complex(torch.ones(3), torch.tensor([0.0, math.nan, 0.0])))


def test_a_sparse_gradient_is_looked_at_where_it_has_values():
    indices = torch.tensor([[0, 2]])
    finite, bad = (
        torch.sparse_coo_tensor(indices, torch.tensor(v), (4,), check_invariants=True)
        for v in ([1.0, 2.0], [1.0, math.inf])
    )
    assert not is_marked(finite)
    assert is_marked(finite, bad)


def test_without_gradients_nothing_is_found():
    assert not is_marked(None, torch.zeros(0))


def test_the_largest_finite_values_are_finite_and_no_bit_is_changed():
    gradient = torch.tensor([3e38, -3e38, 1e-42, -0.0] * 20)
    before = gradient.clone().view(torch.int32)
    assert not is_marked(gradient)
    assert torch.equal(gradient.view(torch.int32), before)


# ---------------------------------------------------------------------- raise


def poison_at(*iters, value=math.nan):
    """The gradient of the first parameter, behind the backward pass."""

    def poison(trainer):
        if trainer.iter in iters:
            next(trainer.model.parameters()).grad.view(-1)[0] = value

    return CallbackHook(after_backward=poison)


def scaled(*args, **kwargs):
    return AMPTrainer(*args, grad_scaler=torch.amp.GradScaler("cpu", init_scale=16.0), **kwargs)


def poisoned(iters, make=sgd, trainer_class=SimpleTrainer, **kwargs):
    model = Regression()
    trainer = trainer_class(model, batches(10), make(model), **kwargs)
    trainer.register_hooks([poison_at(*iters)])
    return trainer


def state_of(trainer):
    return [
        *trainer.model.parameters(),
        *(v for s in trainer.optimizer.state.values() for v in s.values() if v is not None),
    ]


def test_gradients_that_are_not_finite_end_the_run_before_the_update():
    expected = poisoned([], clip_gradients=GradientClipper("norm", 1.0))
    expected.train(0, 3)
    trainer = poisoned([3], clip_gradients=GradientClipper("norm", 1.0))
    with pytest.raises(FloatingPointError, match=rf"the gradients are not finite in iteration 3: {{.*}}\. {ADVICE}"):
        trainer.train(0, 10)
    assert (trainer.iter, trainer.status) == (3, "failed")
    assert all(torch.equal(a, b) for a, b in zip(state_of(trainer), state_of(expected), strict=True))


@pytest.mark.usefixtures("worker")
def test_asynchronously_gradients_that_are_not_finite_end_the_run_before_the_next_checkpoint():
    trainer = poisoned([3], async_write_metrics=True)
    reached = []
    trainer.register_hooks(
        [AfterStep(lambda t: t.check_finite() if t.iter == 5 else None), AfterStep(lambda t: reached.append(t.iter))]
    )
    with pytest.raises(FloatingPointError, match="the gradients are not finite in iteration 3"):
        trainer.train(0, 10)
    assert reached == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("micro_batch", [0, 1, 2])
def test_one_micro_batch_is_enough(micro_batch):
    data = [torch.tensor(1.0)] * 3
    data[micro_batch] = torch.tensor(math.inf)
    model = Weight()
    trainer = SimpleTrainer(model, data, sgd(model), accumulation_steps=3)
    with pytest.raises(FloatingPointError, match="the loss is not finite in iteration 0: {'total_loss': inf}"):
        trainer.train(0, 1)
    assert model.weight.item() == 1.0


def test_a_run_that_failed_can_begin_anew():
    trainer = poisoned([1])
    with pytest.raises(FloatingPointError):
        trainer.train(0, 3)
    trainer.train(2, 3)
    assert trainer.status == "finished"
    trainer.check_finite()


# ---------------------------------------------------------------------- skip

OPTIMIZERS = {
    "SGD": lambda model, **kwargs: sgd(model, momentum=0.9, **kwargs),
    "fused SGD": lambda model: sgd(model, momentum=0.9, fused=True),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_skipped_update_leaves_weights_and_optimizer_as_they_were(make, asynchronous):
    data = batches(10)
    expected = SimpleTrainer(model := Regression(), [*data[1:3], *data[5:]], make(model))
    expected.train(0, 7)
    trainer = poisoned([0, 3, 4], make, non_finite="skip", async_write_metrics=asynchronous)
    trainer.train(0, 10)
    assert all(torch.equal(a, b) for a, b in zip(state_of(trainer), state_of(expected), strict=True))
    assert [value for value, _ in scalars(trainer)["skipped_updates"]] == [1, 1, 1, 2, 3, 3, 3, 3, 3, 3]
    assert len(scalars(trainer)["total_loss"]) == 10  # the losses were finite

    ignoring = poisoned([0, 3, 4], make, non_finite="ignore", async_write_metrics=asynchronous)
    ignoring.train(0, 10)
    assert any(value.isnan().any() for value in state_of(ignoring))


def test_an_optimizer_in_a_wrapper_skips_as_well():
    model = Regression()
    optimizer = PlainOptimizer(sgd(model, fused=True))
    trainer = SimpleTrainer(model, batches(3), optimizer, non_finite="skip")
    trainer.register_hooks([poison_at(1)])
    trainer.train(0, 3)
    assert optimizer.calls == ["zero_grad", "update", "zero_grad", "zero_grad", "update"]


class Normalized(nn.Module):
    """A loss that is finite whatever happens to the statistics."""

    def __init__(self, loss=lambda weight, x: weight * x.nan_to_num(0, 0, 0).mean()):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.loss = loss

    def forward(self, batch):
        return self.loss(self.weight, self.norm(batch))


def statistics(model):
    return {name: value.clone() for name, value in model.norm.named_buffers()}


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_leaves_the_buffers_as_they_were(fused):
    good = [x for x, _ in batches(4)]
    bad = torch.full((4, 3), math.inf)
    found = []
    for data in ([good[0], bad, *good[1:]], good):
        model = Normalized(lambda weight, x: weight * x.sum())
        trainer = SimpleTrainer(model, data, sgd(model, fused=fused), non_finite="skip")
        trainer.train(0, len(data))
        trainer.check_finite()
        found.append(statistics(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])
    assert found[0]["num_batches_tracked"] == 4

    model = Normalized(lambda weight, x: weight * x.sum())
    SimpleTrainer(model, [bad], sgd(model, fused=fused), non_finite="ignore").train(0, 1)
    assert not model.norm.running_mean.isfinite().all()


def test_a_loss_that_is_not_finite_is_left_out_of_the_averages(asynchronous, caplog):
    model = Weight(lambda weight, batch: {"loss_a": weight * batch, "loss_b": weight})
    data = [torch.tensor(value) for value in (1.0, math.nan, 1.0)]
    trainer = SimpleTrainer(model, data, sgd(model, lr=0.0), non_finite="skip", async_write_metrics=asynchronous)
    with caplog.at_level(logging.WARNING, "trainkit.engine.finite"):
        trainer.train(0, 3)
    assert scalars(trainer) == {
        "total_loss": [(2.0, 0), (2.0, 2)],
        "loss_a": [(1.0, 0), (1.0, 2)],
        "loss_b": [(1.0, 0), (1.0, 1), (1.0, 2)],
        "skipped_updates": [(0.0, 0), (1.0, 1), (1.0, 2)],
    }
    messages = [record.message for record in caplog.records if record.name == "trainkit.engine.finite"]
    assert messages == ["The update of iteration 1 is skipped: the loss is not finite"]


def test_a_finite_gradient_of_a_loss_that_is_not_finite_is_skipped_too():
    model = Weight(lambda weight, batch: weight + batch)
    trainer = SimpleTrainer(
        model, [torch.tensor(v) for v in (0.0, math.inf, 0.0)], sgd(model, lr=0.25), non_finite="skip"
    )
    trainer.train(0, 3)
    assert model.weight.item() == 0.5


def test_so_many_skipped_updates_in_a_row_end_the_run(asynchronous):
    kwargs = {"non_finite": "skip", "max_non_finite_in_row": 3, "async_write_metrics": asynchronous}
    poisoned([1, 2, 4, 5, 7, 8], **kwargs).train(0, 10)
    trainer = poisoned([1, 2, 4, 5, 6, 7], **kwargs)
    trainer.register_hooks([PeriodicWriter([], period=3)])
    with pytest.raises(
        FloatingPointError, match="gradients are not finite in iteration 6: .* is update 3 in a row that"
    ):
        trainer.train(0, 10)
    assert not any(value.isnan().any() for value in state_of(trainer))


@pytest.mark.usefixtures("worker")
def test_the_counts_are_part_of_the_state():
    kwargs = {"non_finite": "skip", "max_non_finite_in_row": 4, "async_write_metrics": True}
    first = poisoned([1, 4, 5], **kwargs)
    states = []
    first.register_hooks([AfterStep(lambda trainer: states.append(trainer.step_state_dict()))])
    first.train(0, 6)
    assert states[-1]["non_finite"] == {"skipped": 3, "in_row": 2}

    for state, last in ((states[-1], 7), (states[0], 9)):
        second = poisoned([6, 7, 8, 9], **kwargs)
        second.load_step_state_dict(state)
        with pytest.raises(FloatingPointError, match=f"in iteration {last}: .* update 4 in a row"):
            second.train(6, 10)


@pytest.fixture
def new_memory_is_nan():
    """What is not initialised is NaN, and not by chance zero."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_fused_sgd_has_clean_momentum_if_its_first_update_is_skipped(new_memory_is_nan):
    trainers = [poisoned([0], make, non_finite="skip") for make in (OPTIMIZERS["SGD"], OPTIMIZERS["fused SGD"])]
    for trainer in trainers:
        trainer.train(0, 3)
    assert torch.equal(*(trainer.model.linear.weight for trainer in trainers))

    with pytest.raises(ConfigError, match="set fused=False"):
        poisoned([], lambda model: sgd(model, momentum=0.5, dampening=0.1, fused=True), non_finite="skip")


def test_an_optimizer_that_makes_skipping_wait_for_the_device_is_named_once(caplog):
    model = Weight().to("meta")
    for trainer_class in (SimpleTrainer, AMPTrainer):
        caplog.clear()
        trainer_class(model, [], sgd(model), non_finite="skip")
        assert [record.message.partition(" so ")[0] for record in caplog.records] == [
            "SGD has no fused implementation here,"
        ]
    caplog.clear()
    SimpleTrainer(model, [], sgd(model))
    SimpleTrainer(Weight(), [], sgd(Weight()), non_finite="skip")
    assert not caplog.records


# ---------------------------------------------------------------------- ignore, mixed precision


def test_ignoring_looks_at_nothing(asynchronous):
    model = Weight()
    data = [torch.tensor(1.0), torch.tensor(math.nan)]
    trainer = SimpleTrainer(model, data, sgd(model), non_finite="ignore", async_write_metrics=asynchronous)
    trainer.train(0, 3)
    trainer.check_finite()
    assert trainer.status == "finished"
    assert [math.isnan(value) for value, _ in scalars(trainer)["total_loss"]] == [False, True, True]
    assert list(scalars(trainer)) == ["total_loss"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("non_finite", ["raise", "skip"])
def test_the_scaler_skips_what_a_hook_has_put_into_unscaled_gradients(non_finite, fused):
    trainer = poisoned([1], lambda model: sgd(model, fused=fused), scaled, non_finite=non_finite)
    trainer.train(0, 3)
    assert all(value.isfinite().all() for value in state_of(trainer))
    assert [value for value, _ in scalars(trainer)["skipped_updates"]] == [0, 1, 1]
    assert trainer.grad_scaler.get_scale() == 8.0

    ignoring = poisoned([1], lambda model: sgd(model, fused=fused), scaled, non_finite="ignore")
    ignoring.train(0, 3)
    assert ignoring.status == "finished"
    assert ignoring.model.linear.weight.isnan().any()


@pytest.mark.parametrize(("in_row", "finished"), [(3, False), (4, True)])
def test_overflown_gradients_of_a_finite_loss_are_a_failure_many_in_a_row(in_row, finished):
    trainer = poisoned([2, 3, 4], sgd, scaled, max_non_finite_in_row=in_row)
    if finished:
        trainer.train(0, 10)
        return
    with pytest.raises(FloatingPointError, match="the gradients are not finite in iteration 4: .* update 3 in a row"):
        trainer.train(0, 10)


def test_bfloat16_skips_without_a_scaler():
    trainer = poisoned([1], sgd, AMPTrainer, precision=torch.bfloat16, non_finite="skip")
    trainer.train(0, 3)
    assert all(value.isfinite().all() for value in state_of(trainer))
    assert [value for value, _ in scalars(trainer)["skipped_updates"]] == [0, 1, 1]


# ---------------------------------------------------------------------- before it is saved or evaluated


@pytest.mark.parametrize("non_finite", ["raise", "skip", "ignore"])
def test_statistics_that_are_not_finite_are_found_though_losses_and_gradients_are(non_finite):
    model = Normalized()
    trainer = SimpleTrainer(model, [torch.full((4, 3), math.inf)], sgd(model), non_finite=non_finite)
    trainer.check_finite()  # the mask was never finite
    trainer.register_hooks([AfterStep(lambda trainer: trainer.check_finite())])
    if non_finite == "ignore":
        trainer.train(0, 1)
        return
    with pytest.raises(FloatingPointError, match=r"iteration 0, .* were: norm.running_mean, norm.running_var \(2 in"):
        trainer.train(0, 1)


@pytest.mark.usefixtures("worker")
def test_an_update_that_overflows_is_found_before_the_weights_are_saved():
    model = Weight()
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model, lr=3.4e38), async_write_metrics=True)
    trainer.train(0, 1)
    trainer.check_finite()
    model.weight.data.fill_(-3e38)
    with pytest.raises(
        FloatingPointError, match=r"the model is not finite in iteration 1, .* were: weight \(1 in all\)"
    ):
        trainer.train(0, 1)


def test_only_floating_values_that_are_there_are_looked_at():
    model = nn.ModuleDict({"meta": nn.Linear(1, 1, device="meta"), "lazy": nn.LazyLinear(1), "norm": nn.BatchNorm1d(1)})
    assert non_finite_names(model) == []
    model["norm"].running_var.fill_(math.nan)
    assert non_finite_names(model) == ["norm.running_var"]


def test_detectron2s_write_metrics_raises_as_ever():
    with (
        EventStorage(),
        pytest.raises(FloatingPointError, match=r"the loss is not finite in iteration 4: {'total_loss"),
    ):
        SimpleTrainer.write_metrics({"loss_a": math.nan}, 0.0, 4)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("non_finite", "warn", "non_finite must be one of raise, skip, ignore, got 'warn'"),
        ("max_non_finite_in_row", 0, "max_non_finite_in_row must be a whole number of iterations >= 1, got 0"),
    ],
)
def test_an_unknown_policy_is_an_error_of_the_constructor(argument, value, message):
    model = Weight()
    with pytest.raises(ValueError, match=message):
        SimpleTrainer(model, [], sgd(model), **{argument: value})


@pytest.mark.parametrize(("options", "iter"), [((), 1), (("SOLVER.NON_FINITE.POLICY", "skip"), 3)])
def test_the_config_gives_the_policy_and_how_many_in_a_row(options, iter, tmp_path):
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "SOLVER.NON_FINITE.MAX_IN_ROW", 3, *options))
    trainer.register_hooks([poison_at(1, 2, 3)])
    with pytest.raises(FloatingPointError, match=f"the gradients are not finite in iteration {iter}"):
        trainer.train()
    assert not any(parameter.isnan().any() for parameter in trainer.model.parameters())


@needs_cuda
@pytest.mark.parametrize("make", [OPTIMIZERS["fused SGD"], OPTIMIZERS["fused AdamW"]], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("trainer_class", [SimpleTrainer, AMPTrainer])
@pytest.mark.parametrize("non_finite", ["raise", "skip"])
def test_on_cuda_a_step_waits_for_nothing(trainer_class, non_finite, make):
    model = Regression().cuda()
    data = [tuple(tensor.cuda() for tensor in batch) for batch in batches(4)]
    trainer = trainer_class(model, data, make(model), non_finite=non_finite, async_write_metrics=True)
    watch = CallbackHook(before_step=lambda t: forbid_waiting() if 3 <= t.iter < 8 else allow_waiting())
    trainer.register_hooks([watch])
    try:
        trainer.train(0, 10)
    finally:
        allow_waiting()
    assert trainer.status == "finished"


def test_a_failure_is_not_found_again_in_a_run_that_follows(asynchronous):
    model = Weight(lambda weight, batch: weight * batch)
    data = [torch.tensor(value) for value in (1.0, math.nan, math.nan, 1.0)]
    trainer = SimpleTrainer(model, data, sgd(model), async_write_metrics=asynchronous)
    trainer.register_hooks([CallbackHook(after_step=lambda trainer: trainer.storage.hand_over())])
    with pytest.raises(FloatingPointError, match="in iteration 1"):
        trainer.train(0, 4)
    with torch.no_grad():
        model.weight.fill_(1.0)
    trainer.reset_data_loader(lambda: [torch.tensor(1.0)])
    trainer.train(0, 3)
    assert trainer.status == "finished"


def test_a_clipper_that_raises_leaves_no_flag_behind():
    model = Weight()

    def clip(parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)

    trainer = SimpleTrainer(model, [torch.tensor(math.inf)], sgd(model), clip_gradients=clip)
    with pytest.raises(RuntimeError, match="non-finite"):
        trainer.train(0, 1)
    trainer.reset_data_loader(lambda: [torch.tensor(1.0)])
    trainer.train(0, 3)
    assert trainer.status == "finished"


@pytest.mark.parametrize("name", ["data_time", "rank_data_time", "skipped_updates"])
def test_a_loss_with_the_name_of_something_that_the_trainer_stores_is_refused(name):
    model = Weight(lambda weight, batch: {"loss": weight, name: weight.detach()})
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model))
    with pytest.raises(ValueError, match=rf"the trainer stores \['{name}'\] itself; give the model's entry another"):
        trainer.train(0, 1)


class CountScans(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "_amp_foreach_non_finite_check" in function.name()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("hooks", "scans"), [([], 5), ([CallbackHook(after_backward=lambda trainer: None)], 10)])
@pytest.mark.parametrize("default", [False, True], ids=["AMPTrainer", "DefaultTrainer"])
def test_gradients_that_a_scaler_has_looked_at_are_looked_at_again_only_if_a_hook_had_them(
    hooks, scans, default, tmp_path
):
    if default:
        trainer = DefaultTrainer(tiny_cfg(tmp_path, "SOLVER.AMP.ENABLED", True, "SOLVER.MAX_ITER", 5))
    else:
        model = Regression()
        trainer = AMPTrainer(model, batches(4), sgd(model))
    trainer.register_hooks(hooks)
    with CountScans() as found:
        trainer.train(0, 5)
    assert found.count == scans
