"""What is not finite ends the run before the weights, a checkpoint or a score have it."""

import math

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Weight, poisoned, sgd, state_of
from trainkit.engine import DefaultTrainer
from trainkit.engine.finite import non_finite_names, raise_failure
from trainkit.engine.step import SimpleTrainer
from trainkit.solver import GradientClipper


def test_gradients_that_are_not_finite_end_the_run_before_the_update():
    expected = poisoned([], clip_gradients=GradientClipper("norm", 1.0))
    expected.train(0, 3)
    trainer = poisoned([3], clip_gradients=GradientClipper("norm", 1.0))
    with pytest.raises(
        FloatingPointError, match="the gradients are not finite in iteration 3: {.*}"
    ):
        trainer.train(0, 10)
    assert trainer.iter == 3
    assert trainer.status == "failed"
    assert all(
        torch.equal(a, b) for a, b in zip(state_of(trainer), state_of(expected), strict=True)
    )


@pytest.mark.parametrize(
    ("by_rank", "message"), [(["bad"], "^bad$"), ([None, "bad", "worse"], r"^bad \(on rank 1\)$")]
)
def test_the_first_failure_is_raised_and_of_several_ranks_the_rank_is_named(by_rank, message):
    with pytest.raises(FloatingPointError, match=message):
        raise_failure(by_rank)


def test_one_micro_batch_is_enough():
    for micro_batch in range(3):
        data = [torch.tensor(1.0)] * 3
        data[micro_batch] = torch.tensor(math.inf)
        model = Weight()
        trainer = SimpleTrainer(model, data, sgd(model), accumulation_steps=3)
        with pytest.raises(
            FloatingPointError, match="the loss is not finite in iteration 0: {'total_loss': inf}"
        ):
            trainer.train(0, 1)
        assert model.weight.item() == 1.0


def test_a_value_that_is_only_in_a_gradient_is_named_one_step_later():
    trainer = poisoned([3])
    with pytest.raises(FloatingPointError, match="the loss is not finite in iteration 4"):
        trainer.train(0, 10)
    last = poisoned([2])
    with pytest.raises(FloatingPointError, match="the model is not finite in iteration 3"):
        last.train(0, 3)


class Normalized(nn.Module):
    """A loss that is finite whatever happens to the statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.unused = nn.ModuleDict(
            {"meta": nn.Linear(1, 1, device="meta"), "lazy": nn.LazyLinear(1)}
        )
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

    def forward(self, batch):
        return self.weight * self.norm(batch).nan_to_num(0, 0, 0).mean()


@pytest.mark.parametrize("non_finite", ["raise", "ignore"])
def test_statistics_that_are_not_finite_are_found_though_losses_and_gradients_are(non_finite):
    model = Normalized()
    trainer = SimpleTrainer(
        model, [torch.full((4, 3), math.inf)], sgd(model), non_finite=non_finite
    )
    trainer.check_finite()  # the mask was never finite
    trainer.register_hooks([AfterStep(lambda trainer: trainer.check_finite())])
    if non_finite == "ignore":
        trainer.train(0, 1)
        return
    with pytest.raises(
        FloatingPointError, match=r"iteration 0, .* norm.running_mean, norm.running_var \(2 in"
    ):
        trainer.train(0, 1)
    with pytest.raises(
        ValueError, match="non_finite must be 'raise', 'ignore' or a NonFinitePolicy, got 'warn'"
    ):
        SimpleTrainer(Weight(), [], sgd(Weight()), non_finite="warn")


@pytest.mark.usefixtures("worker")
def test_an_update_that_overflows_is_found_before_the_weights_are_saved():
    model = Weight()
    trainer = SimpleTrainer(
        model, [torch.tensor(1.0)], sgd(model, lr=3.4e38), async_write_metrics=True
    )
    trainer.train(0, 1)
    trainer.check_finite()
    model.weight.data.fill_(-3e38)
    with pytest.raises(
        FloatingPointError, match=r"the model is not finite in iteration 1, .* weight \(1 in all\)"
    ):
        trainer.train(0, 1)


def test_a_failure_is_not_found_again_in_a_run_that_follows(asynchronous):
    model = Weight(lambda weight, batch: weight * batch)
    data = [torch.tensor(value) for value in (1.0, math.nan, math.nan, 1.0)]
    trainer = SimpleTrainer(model, data, sgd(model), async_write_metrics=asynchronous)
    with pytest.raises(FloatingPointError, match="in iteration 1"):
        trainer.train(0, 4)
    with torch.no_grad():
        model.weight.fill_(1.0)
    trainer.reset_data_loader(lambda: [torch.tensor(1.0)])
    trainer.train(0, 3)
    assert trainer.status == "finished"


TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
TYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


def with_tensors(**tensors):
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    return model


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 5), (40, 50)], ids=str)
def test_one_bad_value_of_any_type_and_size_is_named_among_many_good_ones(dtype, shape):
    good = [torch.ones(shape).to(dtype) for _ in range(3)]
    bad = torch.ones(shape)
    bad.reshape(-1)[-1] = math.nan
    tensors = {"a": good[0], "b": bad.to(dtype), "c": good[1], "d": good[2], "e": torch.ones(2, 2)}
    assert non_finite_names(with_tensors(**tensors)) == ["b"]
    assert non_finite_names(with_tensors(**tensors), except_for={"b"}) == []


def test_large_values_whose_squares_overflow_are_finite():
    largest = torch.full((3,), torch.finfo(torch.float32).max)
    largest_half = torch.full((3000,), torch.finfo(torch.float16).max, dtype=torch.float16)
    model = with_tensors(a=largest, b=largest_half, c=torch.tensor([0.0, -math.inf]))
    assert non_finite_names(model) == ["c"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
def test_tensors_that_have_no_operations_do_not_end_a_run():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    model = with_tensors(
        graph=torch.eye(3).to_sparse(),
        rows=torch.eye(3).to_sparse_csr(),
        lengths=torch.ones(2, dtype=torch.int64),
        lines=nested,
        bad=torch.tensor(math.inf),
    )
    assert non_finite_names(model) == ["bad"]


def test_the_iteration_is_named_also_if_a_default_trainer_makes_the_steps_itself(tmp_path):
    class OwnStep(DefaultTrainer):
        def run_step(self):
            if self.iter == 4:
                with torch.no_grad():
                    next(self.model.parameters()).fill_(math.inf)

    trainer = OwnStep(tiny_cfg(tmp_path, "SOLVER.CHECKPOINT_PERIOD", 5))
    with pytest.raises(FloatingPointError, match="the model is not finite after iteration 4"):
        trainer.train()
