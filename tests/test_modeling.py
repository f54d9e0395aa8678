"""Models by name: what is registered is called with the config, and gives a module."""

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
def fails_inside(cfg):
    return nn.Linear()


def build(name, device="cpu"):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.NAME", name, "MODEL.WIDTH", 3, "MODEL.DEVICE", device])
    return build_model(cfg)


def test_a_model_is_made_from_the_config_on_its_device():
    model = build("gives_layer", "meta")
    assert (model.in_features, model.weight.device.type) == (3, "meta")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gives_nothing", ConfigError, "MODEL.NAME: gives_nothing must return an nn.Module, got NoneType"),
        ("", ConfigError, "MODEL.NAME is empty; set it.*IMPORTS"),
        ("gives_laeyr", ConfigError, "MODEL.NAME: .*gives_laeyr"),
        ("fails_inside", TypeError, "in_features"),
    ],
)
def test_what_makes_no_model_is_an_error(name, error, message):
    with pytest.raises(error, match=message):
        build(name)


@pytest.mark.parametrize("method", ["build_model", "build_optimizer", "build_train_loader"])
def test_a_build_method_without_a_return_is_named(tmp_path, method):
    trainer_type = type("MyTrainer", (DefaultTrainer,), {method: classmethod(lambda cls, *args: None)})
    with pytest.raises(TypeError, match=rf"MyTrainer.{method}\(\) returned None; return the object that it builds"):
        trainer_type(tiny_cfg(tmp_path))


# ---------------------------------------------------------------------- models that return logits


class Takes(nn.Module):
    """Two classes of what ``x`` holds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)


X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])


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
    with pytest.raises(ValueError, match=r"has the shape \[4, 2\]; accepted: a scalar .*losses_from"):
        trainer.train(0, 1)
