import pytest
import torch
from torch import nn

from trainkit.evaluation import LossEvaluator, inference_on_dataset


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


def batch_of(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(n, 2, generator=generator), "y": torch.randn(n, 2, generator=generator)}


def snapshot(model):
    return {name: value.tolist() for name, value in model.state_dict().items()}


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_the_mean_does_not_depend_on_the_order_of_the_batches(order):
    values = [2.0**60, 1.0, -(2.0**60)]
    batches = [torch.tensor([values[i]]) for i in order]
    results = inference_on_dataset(model := Constant(), batches, LossEvaluator(model))
    assert results["loss"]["total_loss"] == 1.0


def test_validation_loss_comes_from_a_method_called_losses_where_there_is_one():
    batch = torch.tensor([1.0, 3.0])
    results = inference_on_dataset(Constant(), [batch], LossEvaluator(model := Constant()))
    assert results == {"loss": {"total_loss": 6.0, "loss_a": 2.0, "loss_b": 4.0, "half": 0.5}}
    assert model.weight.grad is None


def test_validation_loss_works_for_a_model_that_gives_losses_in_train_mode_only():
    model, batch = LossesInTrainMode(), batch_of(8)
    model.norm.running_mean.fill_(0.25)
    model.eval()
    expected = (model(batch) - batch["y"]).square().mean().item()  # running statistics, no dropout

    results = inference_on_dataset(model, [batch], LossEvaluator(model))["loss"]

    assert results["loss_square"] == results["total_loss"] == pytest.approx(expected)
    assert results["accuracy"] == pytest.approx(batch["y"].mean().item())
    model.train()
    assert model(batch)["loss_square"].item() != pytest.approx(expected)  # unfrozen it is another number


def test_modes_buffers_gradients_and_random_state_are_left_as_they_were():
    model, batch = LossesInTrainMode(), batch_of(8)
    model.train()
    model.norm.eval()
    buffers = dict(model.named_buffers())
    before, modes_before, rng_before = snapshot(model), modes(model), torch.get_rng_state().tolist()

    inference_on_dataset(model, [batch, batch_of(3)], LossEvaluator(model, freeze=()))

    assert snapshot(model) == before
    assert modes(model) == modes_before
    assert torch.get_rng_state().tolist() == rng_before
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    model.norm.train()
    model(batch)
    assert snapshot(model) != before
    assert torch.get_rng_state().tolist() != rng_before


def test_an_evaluator_without_a_model_of_its_own_takes_the_one_that_is_evaluated_each_time():
    evaluator = LossEvaluator()
    first, second = Constant(), Constant()
    with torch.no_grad():
        second.weight.mul_(3)
    losses = [
        inference_on_dataset(model, [torch.ones(2)], evaluator)["loss"]["total_loss"] for model in (first, second)
    ]
    assert losses[1] == 3 * losses[0]
