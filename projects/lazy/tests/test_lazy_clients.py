"""Lazy configs in the manner of detrex and of detectron2's own: dataclasses, calls of calls, objects, functions."""

import argparse
import dataclasses
import math

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from trainkit.projects.lazy.config import to_yaml

from trainkit.config import ConfigError, LazyConfig, configurable, instantiate
from trainkit.config import LazyCall as L  # as there
from trainkit.engine import default_setup
from trainkit.utils.logger import close_logger


@dataclasses.dataclass
class ShapeSpec:
    channels: int | None = None
    stride: int | None = None
    area: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        self.area = (self.stride or 0) ** 2


class Thing:
    def __init__(self, **arguments):
        vars(self).update(arguments)

    def __call__(self, more):
        return self.number + more


def reloaded(cfg, folder):
    LazyConfig.save(cfg, folder / "saved.yaml")
    return LazyConfig.load(folder / "saved.yaml")


# ---------------------------------------------------------------------- dataclasses


def test_dataclasses_in_nodes_come_out_as_they_were_also_after_a_save(tmp_path):
    cfg = OmegaConf.create({"width": 1}, flags={"allow_objects": True})
    cfg.model = L(Thing)(
        shapes={"res3": ShapeSpec(channels=512), "res4": ShapeSpec(channels=1024, stride=4)}, many=[ShapeSpec(7)]
    )
    cfg.late = ShapeSpec(channels=3, stride=2)
    for each in (cfg, reloaded(cfg, tmp_path)):
        model = instantiate(each).get("model")
        assert model.shapes == {"res3": ShapeSpec(512), "res4": ShapeSpec(1024, 4)}
        assert model.shapes["res4"].area == 16
        assert model.many == [ShapeSpec(7)]
        assert instantiate(each)["late"] == ShapeSpec(3, 2)


# ---------------------------------------------------------------------- calls


def test_the_target_of_a_call_can_be_a_call(tmp_path):
    cfg = L(L(len)(number=3))(more=4)
    cfg["_target_"]["_target_"] = Thing
    for each in (cfg, reloaded(cfg, tmp_path)):
        assert instantiate(each) == 7


@pytest.mark.parametrize("thing", [5, [3, 4, 5], (1, [2]), {"x": {"y": [1]}}, Thing(), ShapeSpec(1), math.floor, None])
def test_what_describes_no_call_is_given_back_itself(thing):
    assert instantiate(thing) is thing


# ---------------------------------------------------------------------- saving


# ---------------------------------------------------------------------- overrides


def test_a_key_that_is_like_no_other_is_made_with_a_warning(caplog):
    cfg = OmegaConf.create({"train": {"output_dir": "out", "max_iter": 9}})
    LazyConfig.apply_overrides(cfg, ["train.seed=7", "train.ema.decay=0.9"])
    assert (cfg.train.seed, cfg.train.ema.decay) == (7, 0.9)
    assert [message.split(";")[0] for message in caplog.messages] == [
        "train.seed is used as a new key",
        "train.ema.decay is used as a new key",
    ]
    LazyConfig.apply_overrides(cfg, ["train.seed=8", "+train.more=1"])
    assert len(caplog.messages) == 2
    with pytest.raises(ConfigError, match="there is no 'train.max_itr'; did you mean 'max_iter'?"):
        LazyConfig.apply_overrides(cfg, ["train.max_itr=1"])
    with pytest.raises(ConfigError, match="there is no '~train'"):
        LazyConfig.apply_overrides(cfg, ["~train=1"])


# ---------------------------------------------------------------------- configurable


class Sized:
    @configurable
    def __init__(self, size, depth=2):
        self.sizes = size, depth

    @classmethod
    def from_config(cls, cfg, scale=1):
        return {"size": cfg.size * scale}


@configurable(from_config=lambda cfg: {"size": cfg.size})
def sized(size):
    return size


def test_a_configurable_takes_a_lazy_config_as_its_config():
    cfg = OmegaConf.create({"size": 3})
    assert (Sized(cfg).sizes, Sized(cfg=cfg, scale=2, depth=1).sizes, sized(cfg)) == ((3, 2), (6, 1), 3)
    assert (Sized(4).sizes, sized(5)) == ((4, 2), 5)


# ---------------------------------------------------------------------- setup


def setup(cfg, **arguments):
    default_setup(cfg, argparse.Namespace(config_file="", resume=False, eval_only=False, **arguments))
    close_logger()


@pytest.mark.parametrize("wrap", [DictConfig, OmegaConf.create])
def test_default_setup_takes_a_lazy_config(tmp_path, wrap):
    model = L(nn.Linear)(in_features=1, out_features=1)
    cfg = wrap({"train": {"output_dir": str(tmp_path / "out"), "seed": 7, "device": "cuda"}, "model": model})
    setup(cfg)
    first = torch.rand(())
    assert to_yaml(LazyConfig.load(tmp_path / "out" / "config.yaml")) == to_yaml(cfg)
    assert (tmp_path / "out" / "log.txt").is_file()
    setup(cfg)
    assert torch.rand(()) == first
    assert (tmp_path / "out" / "previous_1" / "config.yaml").is_file()
    cfg.train.seed = 8
    setup(cfg)
    assert torch.rand(()) != first
    assert cfg.train.device == "cuda"
    setup(cfg, num_gpus=0)
    assert cfg.train.device == "cpu"


def test_a_lazy_config_without_a_folder_is_an_error_that_names_the_key():
    with pytest.raises(ConfigError, match="train.output_dir is missing in the config, which has model; set it"):
        setup(OmegaConf.create({"model": {}}))


# ---------------------------------------------------------------------- names of detectron2
