"""The validation loss; with accuracies also on two ranks."""

import math
import random
import tracemalloc
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from torch import nn

from tests.two_ranks import on_two_ranks
from trainkit.data import build_test_loader, trivial_batch_collator
from trainkit.evaluation import ClassificationEvaluator, LossEvaluator, inference_on_dataset
from trainkit.utils.env import get_rng_state
from trainkit.utils.events import EventStorage, get_event_storage


class LossesInTrainMode(nn.Module):
    """Gives losses in train mode only, as detection models do; has every kind of state that training changes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2, momentum=0.5)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("last_mean", torch.zeros(()))

    def forward(self, batch):
        out = self.drop(self.norm(self.linear(batch["x"])))
        if not self.training:
            return out
        self.num_calls += 1  # written in place
        self.last_mean = out.mean().detach()  # replaced
        return {"loss_square": (out - batch["y"]).square().mean(), "accuracy": batch["y"].mean()}


class Constant(nn.Module):
    """Its loss is the mean of the batch, from ``losses``."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return batch

    def losses(self, batch):
        assert not self.training
        mean = self.weight * batch.mean()
        return {"loss_a": mean, "loss_b": 2 * mean, "half": torch.tensor(0.5)}


def batch_of(n):
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(n, 2, generator=generator),
        "y": torch.randn(n, 2, generator=generator),
    }


def test_the_mean_does_not_depend_on_the_order_of_the_batches():
    batches = [torch.tensor([value]) for value in (2.0**60, 1.0, -(2.0**60))]
    results = inference_on_dataset(Constant(), batches, LossEvaluator())
    assert results["loss"]["total_loss"] == 1.0


def test_validation_loss_comes_from_a_method_called_losses_where_there_is_one():
    batches = [torch.tensor([1.0, 3.0]), torch.tensor([8.0])]
    evaluator = LossEvaluator()
    results = inference_on_dataset(model := Constant(), batches, evaluator)
    assert results == {"loss": {"total_loss": 12.0, "loss_a": 4.0, "loss_b": 8.0, "half": 0.5}}
    assert model.weight.grad is None
    with torch.no_grad():
        (other := Constant()).weight.mul_(3)
    # the model of this evaluation
    assert inference_on_dataset(other, batches, evaluator)["loss"]["total_loss"] == 36


def test_validation_loss_works_for_a_model_that_gives_losses_in_train_mode_only():
    model, batch = LossesInTrainMode(), batch_of(8)
    model.norm.running_mean.fill_(0.25)
    model.eval()
    expected = (model(batch) - batch["y"]).square().mean().item()  # running statistics, no dropout
    results = inference_on_dataset(model, [batch], LossEvaluator())["loss"]
    assert results["loss_square"] == results["total_loss"] == pytest.approx(expected)
    assert results["accuracy"] == pytest.approx(batch["y"].mean().item())
    model.train()
    # unfrozen it is another number
    assert model(batch)["loss_square"].item() != pytest.approx(expected)


def test_modes_buffers_gradients_and_random_state_are_left_as_they_were():
    model, batch = LossesInTrainMode(), batch_of(8)
    model.train()
    model.norm.eval()
    buffers = dict(model.named_buffers())

    def state():
        values = {name: value.tolist() for name, value in model.state_dict().items()}
        return (
            values,
            [module.training for module in model.modules()],
            torch.get_rng_state().tolist(),
        )

    before = state()
    inference_on_dataset(model, [batch, batch_of(3)], LossEvaluator())

    assert state() == before
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())


class KeepsPartInEval(nn.Module):
    """Its own ``train()`` leaves a part frozen, as detectors do with the first stages."""

    def __init__(self):
        super().__init__()
        self.frozen = Doubles()
        self.trained = Doubles()

    def train(self, mode=True):
        super().train(mode)
        self.frozen.training = False
        return self

    def forward(self, batch):
        return {"loss": (self.trained(batch) + self.frozen(batch)).mean()}


class Doubles(nn.Module):
    """Gives twice as much in train mode."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return self.weight * batch * (2 if self.training else 1)


def test_a_part_that_a_model_keeps_in_eval_mode_stays_there():
    evaluator = LossEvaluator()
    model = KeepsPartInEval().train()
    evaluator.bind(model)
    model.eval()
    evaluator.process(torch.tensor([1.0]), None)
    assert evaluator.evaluate()["loss"]["loss"] == 3.0  # both parts trained: 4, none: 2
    assert not model.trained.training


class GivesBuffer(Constant):
    """Returns a buffer that it changes in each batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(()))

    def losses(self, batch):
        self.last.copy_(batch.mean())
        return {"loss": self.weight * batch.mean(), "last": self.last}


def test_a_value_that_the_next_batch_changes_is_that_of_its_own_batch():
    batches = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([6.0])]
    results = inference_on_dataset(GivesBuffer(), batches, LossEvaluator())
    assert results["loss"]["last"] == 3.0


def test_values_that_are_not_finite_or_too_large_together_stay_what_they_are():
    def mean_of(*values):
        batches = [torch.tensor([value], dtype=torch.float64) for value in values]
        return inference_on_dataset(Constant().double(), batches, LossEvaluator())["loss"]["loss_a"]

    assert mean_of(1.0, math.inf) == math.inf
    assert math.isnan(mean_of(math.inf, -math.inf))
    assert mean_of(-1.5e308, -1.5e308) == -math.inf


def test_memory_does_not_grow_with_the_number_of_batches():
    evaluator = LossEvaluator()
    evaluator.bind(Constant().eval())
    batch = torch.tensor([0.1])

    def bytes_in_use(num_batches):
        for _ in range(num_batches):
            evaluator.process(batch, None)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = bytes_in_use(500)
        late = bytes_in_use(5000)
    finally:
        tracemalloc.stop()
    assert late - early < 5000 * 16  # less than a number of each batch
    assert evaluator.evaluate()["loss"]["loss_a"] == pytest.approx(0.1)


class Model(Constant):
    """Scores for an accuracy too."""

    def forward(self, batch):
        return self.weight * batch["scores"]

    def losses(self, batch):
        return {"loss_a": self.weight * batch["label"].float().mean()}


def batch(*labels):
    """The first sample of each batch is right, the others are wrong."""
    predicted = [labels[0], *(1 - label for label in labels[1:])]
    return {"scores": torch.eye(2)[predicted], "label": torch.tensor(labels)}


PARTS = [[batch(1, 0, 1, 1)], [batch(0)]]  # rank -> batches


def evaluate(batches):
    return inference_on_dataset(Model(), batches, [ClassificationEvaluator(), LossEvaluator()])


def results(rank, folder):
    return evaluate(PARTS[rank]), evaluate(PARTS[0] if rank == 0 else [])


def test_ranks_together_give_the_results_of_one_process_on_rank_0(tmp_path):
    alone = evaluate(PARTS[0] + PARTS[1])
    assert alone["classification"]["top1"] == 40.0
    assert alone["loss"]["total_loss"] == 0.6
    assert on_two_ranks([results], tmp_path)["results"] == [(alone, evaluate(PARTS[0])), ({}, {})]


class Square(nn.Module):
    """Its loss is the mean square of all values of a batch; a list of tensors has one sample each."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        if not self.training:
            return batch
        values = torch.stack(batch) if isinstance(batch, list) else batch
        return (self.weight * values).square().mean()


@pytest.mark.parametrize("size", [1, 5, 7, 12])
def test_a_list_of_tensors_counts_by_its_length_so_the_size_of_a_batch_does_not_matter(size):
    samples = [torch.full((5,), float(i)) for i in range(12)]
    loader = build_test_loader(samples, batch_size=size, collate_fn=trivial_batch_collator)
    results = inference_on_dataset(Square(), loader, LossEvaluator())
    assert results["loss"]["total_loss"] == pytest.approx(506 / 12)  # squares of 0 to 11


class TimeMajor(Square):
    """A batch is ``[T, N]``."""

    def num_samples(self, batch):
        return batch.shape[1]


def test_a_model_that_says_its_number_of_samples_is_believed():
    batches = [torch.full((6, 1), 3.0), torch.full((2, 3), 1.0)]
    results = inference_on_dataset(TimeMajor(), batches, LossEvaluator())
    assert results["loss"]["total_loss"] == pytest.approx(3.0)  # of 9, 1, 1 and 1


class Tokens(nn.Module):
    """A language model's mean loss over the tokens that are not padding (-100), and their number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        if not self.training:
            return batch
        counted = batch[batch != -100.0]
        return {"loss": self.weight * counted.mean(), "num_tokens": torch.tensor(len(counted))}


@pytest.mark.parametrize("sizes", [[1] * 24, [23, 1], [1, 23], [24], [5, 8, 11]])
def test_weighted_by_tokens_the_loss_is_that_of_all_tokens_in_any_division_into_batches(sizes):
    """The last sequence is all padding: alone its loss is NaN, and its weight is 0."""
    torch.manual_seed(0)
    sequences = [
        torch.cat([torch.rand(i % 7), torch.full((7 - i % 7,), -100.0)]) for i in range(1, 25)
    ]
    data = torch.stack(sequences)
    data[-1] = -100.0
    counted = data[data != -100.0].double()
    results = inference_on_dataset(Tokens(), data.split(sizes), LossEvaluator(weight="num_tokens"))
    assert results == {"loss": {"total_loss": pytest.approx(counted.mean().item()), "loss": ANY}}
    assert results["loss"]["loss"] == results["loss"]["total_loss"]
    by_samples = inference_on_dataset(Tokens(), data[:-1].split([22, 1]), LossEvaluator())
    assert by_samples["loss"]["total_loss"] != pytest.approx(counted.mean().item(), rel=1e-3)


def test_a_weight_that_the_model_does_not_return_or_that_is_always_0_is_an_error():
    with pytest.raises(
        ValueError, match=r"weight .* is 'tokens', but .* \['loss', 'num_tokens', 'total_loss'\]"
    ):
        inference_on_dataset(Tokens(), [torch.ones(2, 3)], LossEvaluator(weight="tokens"))
    with pytest.raises(ValueError, match="num_tokens of the loss 'total_loss' add up to 0"):
        inference_on_dataset(
            Tokens(), [torch.full((2, 3), -100.0)], LossEvaluator(weight="num_tokens")
        )
    with pytest.raises(ValueError, match="weight must be the name of an entry, or None, got 3"):
        LossEvaluator(weight=3)


class Random(nn.Module):
    """``draw(self, x)`` is random in train mode."""

    def __init__(self, draw):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.draw = draw

    def forward(self, batch):
        get_event_storage().put_scalar("seen", 1.0)
        x = self.draw(self, self.weight * self.norm(batch))
        return {"loss": x.square().mean(), "mean": batch.mean()} if self.training else x


class RandomButForLosses(Random):
    def losses(self, batch):
        return {"loss": self.draw(self, self.weight * self.norm(batch)).square().mean()}


def attend(model, x):
    parts = x.view(-1, 1, 4, 4)
    dropout_p = 0.3 if model.training else 0.0
    return nn.functional.scaled_dot_product_attention(parts, parts, parts, dropout_p=dropout_p)


RANDOM = {
    "functional dropout": lambda model, x: nn.functional.dropout(x, 0.5, model.training),
    "drop path": lambda model, x: x * (torch.rand(len(x), 1) > 0.5) if model.training else x,
    "attention": attend,
    "noise": lambda model, x: x + torch.randn_like(x) if model.training else x,
    "numpy": lambda model, x: x * np.random.rand() if model.training else x,
    "python": lambda model, x: x * random.random() if model.training else x,
}


def losses_of(model, batches, caplog):
    """The result and the warnings; random state, modes and buffers are as before."""
    model.train()
    states = get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    caplog.clear()
    with EventStorage() as storage:
        result = inference_on_dataset(model, batches, LossEvaluator())
        assert len(storage.histories()["seen"].values()) <= 2 * len(batches)
    after = get_rng_state()
    assert torch.equal(after["python"][1], states["python"][1])
    assert torch.equal(after["numpy"][1], states["numpy"][1])
    assert torch.equal(after["torch"], states["torch"])
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(module.training for module in model.modules())
    return result["loss"]["total_loss"], caplog.messages


def exact(model, batches):
    """Of all values at once, without random numbers."""
    with EventStorage(), torch.no_grad():
        return model.eval()(torch.cat(batches)).double().square().mean().item()


@pytest.mark.parametrize("kind", RANDOM)
def test_a_loss_that_is_random_in_train_mode_draws_one_warning_that_names_losses(kind, caplog):
    batches = [torch.randn(32, 16) for _ in range(2)]
    model = Random(RANDOM[kind])
    _, [message] = losses_of(model, batches, caplog)
    assert "total_loss of one batch is" in message
    assert "model a method losses(batch)" in message
    assert losses_of(model, batches, caplog)[1] == []  # once per model
    right = RandomButForLosses(RANDOM[kind])
    right.norm.running_mean.fill_(0.5)
    expected = exact(right, batches)
    found, messages = losses_of(right, batches, caplog)
    assert messages == []
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_frozen_modules_make_exact_draws_no_warning(caplog):
    batches = [torch.randn(32, 16) for _ in range(2)]
    model = Random(lambda model, x: model.drop(x))
    expected = exact(model, batches)
    found, messages = losses_of(model, batches, caplog)
    assert messages == []
    assert found == pytest.approx(expected, rel=1e-5)
