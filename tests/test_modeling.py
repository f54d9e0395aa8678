"""Models by name: what is registered is called with the config, and gives a module."""

import copy
import inspect
from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError, get_cfg
from trainkit.engine import DefaultTrainer, HookBase, SimpleTrainer
from trainkit.modeling import MODEL_REGISTRY, build_model, losses_from


@MODEL_REGISTRY.register()
def gives_layer(cfg):
    return nn.Linear(cfg.MODEL.WIDTH, 1)


@MODEL_REGISTRY.register()
def gives_nothing(cfg):
    nn.Linear(cfg.MODEL.WIDTH, 1)


@MODEL_REGISTRY.register()
def takes_width(cfg, width):
    return nn.Linear(width, 1)


@MODEL_REGISTRY.register()
class TakesNothing(nn.Module):
    def __init__(self):
        super().__init__()


@MODEL_REGISTRY.register()
def fails_inside(cfg):
    return nn.Linear()


def build(name):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.NAME", name, "MODEL.WIDTH", 3, "MODEL.DEVICE", "cpu"])
    return build_model(cfg)


def test_a_model_is_made_from_the_config():
    assert build("gives_layer").in_features == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gives_nothing",
            "gives_nothing, registered as MODEL.NAME 'gives_nothing', must return an nn.Module, got None",
        ),
        ("takes_width", "takes_width, registered .* must take the config as its one argument: .* argument: 'width'"),
        ("TakesNothing", "TakesNothing, registered .* must take the config as its one argument: "),
    ],
)
def test_what_makes_no_model_is_named_with_its_module(name, message):
    with pytest.raises(ConfigError, match=f"^tests.test_modeling.{message}"):
        build(name)


def test_an_error_in_the_code_of_a_model_stays_what_it_is():
    with pytest.raises(TypeError, match="in_features"):
        build("fails_inside")


@pytest.mark.parametrize("method", ["build_model", "build_optimizer", "build_train_loader"])
def test_a_build_method_without_a_return_is_named(tmp_path, method):
    trainer_type = type("MyTrainer", (DefaultTrainer,), {method: classmethod(lambda cls, *args: None)})
    with pytest.raises(TypeError, match=rf"MyTrainer.{method}\(\) returned None; return the object that it builds"):
        trainer_type(tiny_cfg(tmp_path))


# ---------------------------------------------------------------------- models that return logits


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


class Points(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y),
        [X, Y],
        Points(X, Y),
        {"image": X, "label": Y},
        {"anything": X, "labels": Y},
        UserDict({"image": X, "label": Y}),
        {"scale": 1.0, "label": Y, "x": X},
        (X, torch.ones(()), Y),
    ],
    ids=str,
)
def test_a_model_that_returns_logits_takes_batches_of_all_usual_kinds(batch):
    model = losses_from(Takes(), F.cross_entropy)
    logits = model.linear(X)
    assert torch.equal(model(batch), F.cross_entropy(logits, Y))
    assert torch.equal(model.losses(batch), F.cross_entropy(logits, Y))
    assert torch.equal(model.eval()(batch), logits)
    assert torch.equal(model.losses(batch), F.cross_entropy(logits, Y))


def test_a_tensor_is_input_and_target_and_a_mapping_for_prediction_needs_no_target():
    model = losses_from(nn.Linear(3, 3), F.mse_loss)
    assert torch.equal(model(X), F.mse_loss(nn.Linear.forward(model, X), X))
    assert torch.equal(model.eval()({"image": X}), nn.Linear.forward(model, X))


def test_another_batch_needs_a_function_that_splits_it():
    batch = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    with pytest.raises(TypeError, match=r"^losses_from takes batches that are .*, got list; give it .* split\(batch\)"):
        losses_from(Takes(), F.cross_entropy)(batch)

    def split(samples):
        return {"x": torch.stack([sample["x"] for sample in samples])}, torch.stack([s["y"] for s in samples])

    model = losses_from(Takes(), F.cross_entropy, split)
    assert torch.equal(model(batch), F.cross_entropy(model.linear(X), Y))


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
            return {"loss_cls": self.scale * F.cross_entropy(logits, target), "size": logits.detach().norm()}

    model = losses_from(Takes(), Scaled())
    assert [*model.state_dict()] == ["linear.weight", "linear.bias", "trainkit_loss.scale"]
    trainer = SimpleTrainer(model, [(X, Y)], torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(0, 5)
    losses = [value for value, _ in trainer.storage.history("loss_cls").values()]
    assert losses == sorted(losses, reverse=True)
    assert model.trainkit_loss.scale < 3


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


def test_a_model_with_its_own_loss_is_called_with_all_entries_and_gives_its_logits_in_eval_mode():
    class Own(Takes):
        def forward(self, x, labels=None):
            logits = self.linear(x)
            return Output(None if labels is None else F.cross_entropy(logits, labels), logits)

    model = losses_from(Own())
    assert torch.equal(model({"x": X, "labels": Y}), F.cross_entropy(model.linear(X), Y))
    assert torch.equal(model.eval()({"x": X, "labels": Y}), model.linear(X))


@pytest.mark.parametrize("batch", [[X, Y], (X, Y), {"image": X, "label": Y}], ids=["list", "tuple", "dict"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_batch_given_to_a_model_that_takes_a_tensor_is_an_error_that_names_losses_from(
    batch, accumulation_steps, caplog
):
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SimpleTrainer(model, [batch], optimizer, accumulation_steps=accumulation_steps)
    kind = type(batch).__name__
    with pytest.raises(TypeError, match=r"linear\(\)") as error:
        trainer.train(0, 1)
    # Python 3.10 has no notes, and they are logged there
    [note] = getattr(error.value, "__notes__", None) or [text for text in caplog.messages if "losses_from" in text]
    assert f"The model was called with one argument, the batch, a {kind}; " in note
    assert "give trainkit.modeling.losses_from(model, loss_fn)" in note


def test_other_errors_of_a_step_stay_as_they_are():
    class Broken(Takes):
        def forward(self, batch):
            return self.linear(batch["x"]) + None

    class Looks(HookBase):
        def after_backward(self):
            self.trainer.batch.shape  # noqa: B018

    def train(model, *hooks):
        trainer = SimpleTrainer(model, [{"x": X, "label": Y}], torch.optim.SGD(model.parameters(), lr=0.1))
        trainer.register_hooks(hooks)
        trainer.train(0, 1)

    with pytest.raises(TypeError, match="unsupported operand") as error:
        train(Broken())
    assert not hasattr(error.value, "__notes__")
    with pytest.raises(AttributeError, match="'dict' object has no attribute 'shape'") as error:
        train(losses_from(Takes(), F.cross_entropy), Looks())
    assert not hasattr(error.value, "__notes__")


def test_logits_in_the_place_of_a_loss_are_an_error_that_names_losses_from():
    model = Takes()
    trainer = SimpleTrainer(model, [X], torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"must be a scalar, got shape \[4, 2\]; reduce it first \(.*losses_from"):
        trainer.train(0, 1)
