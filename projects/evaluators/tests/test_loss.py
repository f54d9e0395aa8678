"""The validation loss; with accuracies also on two ranks."""

import pytest
import torch
from torch import nn

from tests.two_ranks import on_two_ranks
from trainkit.evaluation import ClassificationEvaluator, LossEvaluator, inference_on_dataset


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
    assert (
        inference_on_dataset(other, batches, evaluator)["loss"]["total_loss"] == 36
    )  # the model of this evaluation


def test_validation_loss_works_for_a_model_that_gives_losses_in_train_mode_only():
    model, batch = LossesInTrainMode(), batch_of(8)
    model.norm.running_mean.fill_(0.25)
    model.eval()
    expected = (model(batch) - batch["y"]).square().mean().item()  # running statistics, no dropout
    results = inference_on_dataset(model, [batch], LossEvaluator())["loss"]
    assert results["loss_square"] == results["total_loss"] == pytest.approx(expected)
    assert results["accuracy"] == pytest.approx(batch["y"].mean().item())
    model.train()
    assert model(batch)["loss_square"].item() != pytest.approx(
        expected
    )  # unfrozen it is another number


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
    assert (alone["classification"]["top1"], alone["loss"]["total_loss"]) == (40.0, 0.6)
    assert on_two_ranks([results], tmp_path)["results"] == [(alone, evaluate(PARTS[0])), ({}, {})]
