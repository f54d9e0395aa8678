"""Updates with values that are not finite: found on the device, and left out or the end of the run."""

import itertools
import math

import pytest
import torch
from torch import nn
from trainkit.projects.non_finite.policies import CheckGradients, SkipNonFinite

from tests.cuda import allow_waiting, forbid_waiting, needs_cuda
from tests.docs.pages import blocks, run
from tests.engine.job import tiny_cfg
from tests.engine.tiny import (
    AfterStep,
    Regression,
    Weight,
    batches,
    poison_at,
    poisoned,
    scalars,
    sgd,
    state_of,
)
from trainkit.config import ConfigError
from trainkit.engine import AMPTrainer, DefaultTrainer
from trainkit.engine.hooks import CallbackHook, PeriodicWriter
from trainkit.engine.step import SimpleTrainer

(WITHOUT_CONFIG,) = blocks("projects/non_finite/README.md", "python")

OPTIMIZERS = {
    "SGD": lambda model: sgd(model, momentum=0.9),
    "fused SGD": lambda model: sgd(model, momentum=0.9, fused=True),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
}


def is_found(*gradients):
    """Whether a run ends that has these gradients in its first step."""
    model = nn.Module()
    model.own = nn.ParameterList(
        [torch.ones(()), *(torch.zeros_like(gradient.to_dense()) for gradient in gradients)]
    )
    model.forward = lambda batch: model.own[0] * batch

    def replace(trainer):
        for parameter, gradient in zip([*model.own][1:], gradients, strict=True):
            parameter.grad = gradient

    trainer = SimpleTrainer(model, [torch.ones(())], sgd(model), non_finite=CheckGradients())
    trainer.register_hooks([CallbackHook(after_backward=replace)])
    try:
        trainer.train(0, 1)
    except FloatingPointError:
        return True
    return False


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_value_that_is_not_finite_is_found_in_gradients_of_every_type(dtype):
    others = [torch.ones(4), torch.ones(4, dtype=torch.float64)]
    assert not is_found(*others, torch.full((100,), 2.0, dtype=dtype))
    for value, place in itertools.product([math.nan, math.inf, -math.inf], [0, 99]):
        gradient = torch.full((100,), 2.0, dtype=dtype)
        gradient[place] = value
        assert is_found(*others, gradient)
        assert is_found(gradient, *others)


def test_a_sparse_gradient_is_looked_at_where_it_has_values():
    indices = torch.tensor([[0, 2]])
    finite = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (4,), check_invariants=True)
    assert not is_found(finite)
    assert is_found(finite, finite * math.inf)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_skipped_update_leaves_weights_and_optimizer_as_they_were(make, asynchronous):
    data = batches(10)
    expected = SimpleTrainer(model := Regression(), [*data[1:3], *data[5:]], make(model))
    expected.train(0, 7)
    trainer = poisoned(
        [0, 3, 4], make, non_finite=SkipNonFinite(), async_write_metrics=asynchronous
    )
    trainer.train(0, 10)
    assert all(
        torch.equal(a, b) for a, b in zip(state_of(trainer), state_of(expected), strict=True)
    )
    assert [value for value, _ in scalars(trainer)["skipped_updates"]] == [
        1,
        1,
        1,
        2,
        3,
        3,
        3,
        3,
        3,
        3,
    ]
    assert len(scalars(trainer)["total_loss"]) == 10  # the losses were finite


class Normalized(nn.Module):
    """A batch norm that sees the batch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

    def forward(self, batch):
        return self.weight * self.norm(batch).sum()


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_leaves_the_buffers_as_they_were(fused):
    good = [x for x, _ in batches(4)]
    bad = torch.full((4, 3), math.inf)
    found = []
    for data in ([good[0], bad, *good[1:]], good):
        model = Normalized()
        optimizer = sgd(model, fused=fused)
        trainer = SimpleTrainer(model, data, optimizer, non_finite=SkipNonFinite())
        trainer.train(0, len(data))
        trainer.check_finite()
        found.append({name: value.clone() for name, value in model.norm.named_buffers()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])
    assert found[0]["num_batches_tracked"] == 4


def test_a_loss_that_is_not_finite_is_left_out_of_the_averages(asynchronous):
    model = Weight(lambda weight, batch: {"loss_a": weight * batch, "loss_b": weight})
    data = [torch.tensor(value) for value in (1.0, math.nan, 1.0)]
    trainer = SimpleTrainer(
        model,
        data,
        sgd(model, lr=0.0),
        non_finite=SkipNonFinite(),
        async_write_metrics=asynchronous,
    )
    trainer.train(0, 3)
    assert scalars(trainer) == {
        "total_loss": [(2.0, 0), (2.0, 2)],
        "loss_a": [(1.0, 0), (1.0, 2)],
        "loss_b": [(1.0, 0), (1.0, 1), (1.0, 2)],
        "skipped_updates": [(0.0, 0), (1.0, 1), (1.0, 2)],
    }


def test_so_many_skipped_updates_in_a_row_end_the_run_and_the_counts_are_part_of_the_state(
    asynchronous,
):
    def make(bad):
        policy = SkipNonFinite(max_in_row=3)
        return poisoned(bad, non_finite=policy, async_write_metrics=asynchronous)

    first, states = make([1, 2, 4, 5, 7, 8]), []
    first.register_hooks([AfterStep(lambda trainer: states.append(trainer.step_state_dict()))])
    first.train(0, 10)
    assert states[5]["non_finite"] == {"skipped": 4, "in_row": 2}

    trainer = make([1, 2, 4, 5, 6, 7])
    trainer.register_hooks([PeriodicWriter([], period=3)])
    with pytest.raises(
        FloatingPointError, match="gradients are not finite in iteration 6: .* is update 3 in a row"
    ):
        trainer.train(0, 10)
    assert not any(value.isnan().any() for value in state_of(trainer))

    for state, last in ((states[5], 6), (states[0], 8)):
        resumed = make([6, 7, 8, 9])
        resumed.load_step_state_dict(state)
        with pytest.raises(FloatingPointError, match=f"in iteration {last}: .* update 3 in a row"):
            resumed.train(6, 10)


@pytest.fixture
def new_memory_is_nan():
    """What is not initialised is NaN, and not by chance zero."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_fused_sgd_has_clean_momentum_if_its_first_update_is_skipped(new_memory_is_nan):
    trainers = [
        poisoned([0], OPTIMIZERS[name], non_finite=SkipNonFinite()) for name in ("SGD", "fused SGD")
    ]
    for trainer in trainers:
        trainer.train(0, 3)
    assert torch.equal(*(trainer.model.linear.weight for trainer in trainers))
    with pytest.raises(ConfigError, match="set fused=False"):
        poisoned(
            [],
            lambda model: sgd(model, momentum=0.5, dampening=0.1, fused=True),
            non_finite=SkipNonFinite(),
        )


def test_the_trainer_of_the_page_leaves_out_an_update():
    model = Regression()
    names = {"SimpleTrainer": SimpleTrainer, "model": model, "data_loader": batches(4)}
    trainer = run(WITHOUT_CONFIG, "README.md", **names, optimizer=sgd(model))["trainer"]
    trainer.register_hooks([poison_at(1)])
    trainer.train(0, 4)
    assert trainer.skipped_updates == 1
    assert trainer.policy.max_in_row == 10


def test_an_unknown_policy_names_all_that_there_are(tmp_path):
    with pytest.raises(ConfigError) as caught:
        DefaultTrainer(tiny_cfg(tmp_path, "SOLVER.NON_FINITE.POLICY", "skp"))
    known = str(caught.value).partition("accepted: ")[2].split(", ")
    assert {"raise", "ignore", "skip", "gradients"} <= {*known}
    assert "did you mean 'skip'" in str(caught.value)


@pytest.mark.parametrize(("policy", "iter"), [("gradients", 1), ("skip", 3)])
def test_the_config_gives_the_policy_and_how_many_in_a_row(policy, iter, tmp_path):
    trainer = DefaultTrainer(
        tiny_cfg(tmp_path, "SOLVER.NON_FINITE.MAX_IN_ROW", 3, "SOLVER.NON_FINITE.POLICY", policy)
    )
    trainer.register_hooks([poison_at(1, 2, 3)])
    with pytest.raises(
        FloatingPointError, match=f"the gradients are not finite in iteration {iter}"
    ):
        trainer.train()
    assert not any(parameter.isnan().any() for parameter in trainer.model.parameters())


@needs_cuda
@pytest.mark.parametrize(
    "make", [OPTIMIZERS["fused SGD"], OPTIMIZERS["fused AdamW"]], ids=["SGD", "AdamW"]
)
@pytest.mark.parametrize(
    ("trainer_class", "policy"),
    [
        (SimpleTrainer, SkipNonFinite),
        (AMPTrainer, SkipNonFinite),
        (SimpleTrainer, CheckGradients),
    ],
)
def test_on_cuda_a_step_waits_for_nothing(trainer_class, policy, make):
    model = Regression().cuda()
    data = [tuple(tensor.cuda() for tensor in batch) for batch in batches(4)]
    trainer = trainer_class(model, data, make(model), non_finite=policy(), async_write_metrics=True)
    watch = CallbackHook(
        before_step=lambda t: forbid_waiting() if 3 <= t.iter < 8 else allow_waiting()
    )
    trainer.register_hooks([watch])
    try:
        trainer.train(0, 10)
    finally:
        allow_waiting()
    assert trainer.status == "finished"
