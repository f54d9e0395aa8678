"""Models by name: what is registered is called with the config, and gives a module."""

import pytest
from torch import nn

from trainkit.config import ConfigError, get_cfg
from trainkit.modeling.build import MODEL_REGISTRY, build_model, on_device


@MODEL_REGISTRY.register()
def gives_layer(cfg):
    return nn.Linear(cfg.MODEL.WIDTH, 1)


@MODEL_REGISTRY.register()
def gives_nothing(cfg):
    nn.Linear(cfg.MODEL.WIDTH, 1)


def build(name, device="cpu"):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.NAME", name, "MODEL.WIDTH", 3, "MODEL.DEVICE", device])
    return build_model(cfg)


def test_a_model_is_made_from_the_config_on_its_device():
    model = build("gives_layer", "meta")
    assert model.in_features == 3
    assert model.weight.device.type == "meta"
    without_parameters = nn.Identity()
    assert on_device(get_cfg(), without_parameters) is without_parameters


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gives_nothing", "MODEL.NAME: gives_nothing must return an nn.Module, got NoneType"),
        ("", "MODEL.NAME is empty; set it.*IMPORTS"),
        ("gives_laeyr", "MODEL.NAME: .*gives_laeyr"),
    ],
)
def test_what_makes_no_model_is_an_error(name, message):
    with pytest.raises(ConfigError, match=message):
        build(name)
