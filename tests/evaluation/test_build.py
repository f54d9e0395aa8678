import pytest
import torch
from torch import nn

from trainkit.config import ConfigError, get_cfg
from trainkit.evaluation import (
    EVALUATOR_REGISTRY,
    ClassificationEvaluator,
    DatasetEvaluator,
    DatasetEvaluators,
    LossEvaluator,
    build_evaluator,
)
from trainkit.modeling import MODEL_REGISTRY, build_model


class Scores(nn.Linear):
    def losses(self, batch):
        return self(batch["x"]).mean()


def config(*names):
    cfg = get_cfg()
    cfg.TEST.EVALUATORS = list(names)
    return cfg


def test_one_evaluator_is_built_bare_and_several_as_one():
    model = Scores(2, 3)
    assert isinstance(build_evaluator(config("ClassificationEvaluator"), "toy"), ClassificationEvaluator)
    assert isinstance(build_evaluator(config("LossEvaluator"), "toy"), LossEvaluator)
    both = build_evaluator(config("ClassificationEvaluator", "LossEvaluator"), "toy")
    assert isinstance(both, DatasetEvaluators)
    both.bind(model)
    both.reset()
    inputs = {"label": torch.tensor([0]), "x": torch.ones(1, 2)}
    both.process(inputs, model(inputs["x"]).detach())
    assert sorted(both.evaluate()) == ["classification", "loss"]


def test_a_registered_function_is_called_with_config_and_dataset_name():
    calls = []

    @EVALUATOR_REGISTRY.register()
    def recording_evaluator(cfg, dataset_name):
        calls.append((cfg, dataset_name))
        return DatasetEvaluator()

    cfg = config("recording_evaluator")
    build_evaluator(cfg, "toy")
    assert calls == [(cfg, "toy")]


def test_no_evaluator_in_the_config_is_an_error_that_lists_them():
    with pytest.raises(ConfigError, match=r"TEST.EVALUATORS is empty.*'toy'.*ClassificationEvaluator, .*LossEvaluator"):
        build_evaluator(config(), "toy")


def test_an_unknown_evaluator_is_an_error_that_names_the_key():
    with pytest.raises(ConfigError, match=r"TEST.EVALUATORS: .*LosEvaluator"):
        build_evaluator(config("LosEvaluator"), "toy")


@MODEL_REGISTRY.register()
class TinyModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(cfg.MODEL.NAME)))


@MODEL_REGISTRY.register()
def no_model(cfg):
    return {"weight": 1}


def model_config(name, device="cpu"):
    cfg = get_cfg()
    cfg.MODEL.NAME, cfg.MODEL.DEVICE = name, device
    return cfg


def test_a_model_is_built_from_the_config_on_its_device():
    model = build_model(model_config("TinyModel", "meta"))
    assert isinstance(model, TinyModel)
    assert (len(model.weight), model.weight.device.type) == (9, "meta")


def test_no_model_in_the_config_is_an_error_that_lists_them():
    with pytest.raises(ConfigError, match=r"MODEL.NAME is empty; set it.*TinyModel.*IMPORTS"):
        build_model(model_config(""))


def test_an_unknown_model_is_an_error_that_names_the_key():
    with pytest.raises(ConfigError, match=r"MODEL.NAME: .*TinyModle"):
        build_model(model_config("TinyModle"))


def test_a_registered_model_that_is_no_module_is_an_error():
    with pytest.raises(ConfigError, match=r"no_model, registered as .* must return an nn.Module, got dict"):
        build_model(model_config("no_model"))
