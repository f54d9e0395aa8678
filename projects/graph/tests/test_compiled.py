"""A model that `GraphTrainer` compiles, where nothing is recorded."""

import pytest
import torch
from torch import nn

from tests.engine.tiny import Regression, batches, scalars, sgd
from trainkit.engine import GraphTrainer, SimpleTrainer
from trainkit.engine.hooks import CallbackHook


@pytest.fixture(autouse=True)
def forget_compiled():
    """What is compiled in one test does not count among what is compiled of the same class in another."""
    torch.compiler.reset()


class Telling(nn.Module):
    """Logs whether it is being compiled."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, batch):
        logits = self.linear(batch["x"])
        if not self.training:
            return logits if not torch.compiler.is_compiling() else logits * 0 + torch.tensor([0.0, 1.0])
        compiled = torch.full((), float(torch.compiler.is_compiling()))
        return {"loss_cls": nn.functional.cross_entropy(logits, batch["label"]), "compiled": compiled}


class WithDropout(Regression):
    def forward(self, batch):
        x, y = batch
        return super().forward((nn.functional.dropout(x, 0.1), y))


class Traced(GraphTrainer):
    """What is compiled runs by the kernels of eager mode, which takes no time to compile."""

    def compile_model(self):
        return torch.compile(self.model, dynamic=False, backend="eager")


def losses(trainer):
    return [value for value, _ in scalars(trainer)["total_loss"]]


@pytest.mark.slow
def test_100_compiled_steps_follow_those_of_the_ordinary_trainer_through_a_change_of_shape():
    data = [*batches(4), *batches(1, size=2)]
    trainers = []
    for trainer_type in (SimpleTrainer, GraphTrainer):
        model = WithDropout()
        torch.manual_seed(0)
        trainers.append(trainer_type(model, data, sgd(model, lr=0.05)))
        trainers[-1].train(0, 100)
    ordinary, compiled = trainers

    assert losses(compiled) == pytest.approx(losses(ordinary), rel=1e-5, abs=1e-12)
    assert losses(compiled)[-1] < 0.5 * losses(compiled)[0]
    assert list(compiled.model.state_dict()) == list(ordinary.model.state_dict())


def test_only_training_is_compiled():
    model, batch = Telling(), {"x": torch.ones(3, 4), "label": torch.tensor([0, 1, 0])}
    found = {}
    for trainer_type in (SimpleTrainer, Traced):
        trainer = trainer_type(model, [batch], sgd(model, lr=0.0))
        trainer.train(0, 2)
        found[trainer_type] = [value for value, _ in scalars(trainer)["compiled"]]
        model.eval()
        assert torch.equal(trainer.model(batch), model.linear(batch["x"]))
        model.train()
    assert found == {SimpleTrainer: [0.0, 0.0], Traced: [1.0, 1.0]}


def test_another_model_is_compiled_anew():
    first, second = Regression(), Regression()
    trainer = Traced(first, batches(3), sgd(first))
    trainer.train(0, 2)
    trainer.model, trainer.optimizer = second, sgd(second)
    trainer.train(2, 4)
    assert not torch.equal(second.linear.weight, Regression().linear.weight)


def test_many_shapes_are_no_error():
    model = Regression()
    trainer = Traced(model, [batch for size in range(1, 13) for batch in batches(1, size)], sgd(model, lr=0.01))
    trainer.train(0, 24)
    assert len(losses(trainer)) == 24


def test_hooks_run_around_a_compiled_step_as_around_an_ordinary_one():
    calls = {SimpleTrainer: [], Traced: []}
    for trainer_type, found in calls.items():
        model = Regression()
        trainer = trainer_type(model, batches(3), sgd(model))
        points = ("before_step", "after_backward", "after_step")
        trainer.register_hooks(
            [
                CallbackHook(
                    **{point: lambda t, point=point, found=found: found.append((t.iter, point)) for point in points}
                )
            ]
        )
        trainer.train(0, 2)
    assert calls[Traced] == calls[SimpleTrainer]
    assert len(calls[Traced]) == 6
