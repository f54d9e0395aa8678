"""Models by name: what is registered is called with the config, and gives a module."""

import pytest
from torch import nn

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError, get_cfg
from trainkit.engine import DefaultTrainer
from trainkit.modeling import MODEL_REGISTRY, build_model


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
