"""Models that return logits, trained with batches."""

import copy
import inspect
from collections import UserDict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainkit.engine import SimpleTrainer
from trainkit.modeling import losses_from


class Takes(nn.Module):
    """Two classes of what ``x`` and ``scale`` hold; its own method calls it by name."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x, scale=1.0):
        return self.linear(x) * scale

    def doubled(self, x):
        return self(x, scale=2.0)


X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])
Points, Output = namedtuple("Points", "x y"), namedtuple("Output", "loss logits")


def test_a_model_that_returns_logits_takes_batches_of_all_usual_kinds():
    several = ((X, Y), [X, Y], Points(X, Y), (X, torch.ones(()), Y))
    named = (
        {"image": X, "label": Y},
        UserDict({"anything": X, "labels": Y}),
        {"scale": 1.0, "label": Y, "x": X},
    )
    for batch in (*several, *named):
        model = losses_from(Takes(), F.cross_entropy)
        logits = model.linear(X)
        loss = F.cross_entropy(logits, Y)
        assert torch.equal(model(batch), loss)
        assert torch.equal(model.losses(batch), loss)
        assert torch.equal(model.eval()(batch), logits)
        assert torch.equal(model.losses(batch), loss)
    assert torch.equal(model({"x": X}), logits)
    with pytest.raises(
        ValueError, match=r"no 'label' or 'labels' in the batch with \['x'\]; give .* split"
    ):
        model.train()({"x": X})


def test_the_names_of_the_state_stay_and_so_do_the_calls_of_the_model_itself():
    model = losses_from(Takes(), F.cross_entropy)
    assert [*model.state_dict()] == ["linear.weight", "linear.bias"]
    assert isinstance(model, Takes)
    assert type(model).__name__ == "Takes"
    assert [*inspect.signature(model.forward).parameters] == ["x", "scale"]
    assert torch.equal(model.doubled(X), 2 * model.linear(X))
    again = copy.deepcopy(model)
    nn.init.zeros_(again.linear.weight)
    assert not torch.equal(again((X, Y)), model((X, Y)))


def test_a_loss_that_is_a_module_is_part_of_the_model_and_may_give_several_losses():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, logits, target):
            return {
                "loss_cls": self.scale * F.cross_entropy(logits, target),
                "size": logits.detach().norm(),
            }

    model = losses_from(Takes(), Scaled())
    assert [*model.state_dict()] == ["linear.weight", "linear.bias", "trainkit_loss.scale"]
    trainer = SimpleTrainer(model, [(X, Y)], torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(0, 5)
    losses = [value for value, _ in trainer.storage.history("loss_cls").values()]
    assert losses == sorted(losses, reverse=True)
    assert model.trainkit_loss.scale < 3


def test_a_model_with_its_own_loss_is_called_with_all_entries_and_gives_its_logits_in_eval_mode():
    class Own(Takes):
        def forward(self, x, labels=None):
            logits = self.linear(x)
            return Output(None if labels is None else F.cross_entropy(logits, labels), logits)

    model, batch = losses_from(Own()), {"x": X, "labels": Y}
    assert torch.equal(model(batch), F.cross_entropy(model.linear(X), Y))
    assert torch.equal(model.eval()(batch), model.linear(X))
