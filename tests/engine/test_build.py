"""The registries of `trainkit.engine.build`."""

import pytest
from torch import nn

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.engine.build import WRAPPER_REGISTRY
from trainkit.engine.entry import EvaluationRun


class Wrapped(nn.Module):
    def __init__(self, model, name):
        super().__init__()
        self.model, self.name = model, name

    def forward(self, batch):
        return self.model(batch)


@WRAPPER_REGISTRY.register()
def wrap(cfg, build):
    """Asks the trainer for a name."""
    return Wrapped(build(cfg), build.trainer.name_of(cfg))


class Trainer(DefaultTrainer):
    @classmethod
    def name_of(cls, cfg):
        return f"{cls.__name__} of {cfg.MODEL.NAME}"


@pytest.mark.parametrize("make", [Trainer, lambda cfg: EvaluationRun(cfg, Trainer)], ids=["training", "evaluation"])
def test_a_wrapper_builds_the_model_and_may_call_methods_of_the_trainer(make, tmp_path):
    model = make(tiny_cfg(tmp_path, "MODEL.PARALLEL", "wrap")).model
    assert model.name == "Trainer of TinyClassifier"
    assert type(model.model).__name__ == "TinyClassifier"


def test_a_wrapper_that_is_not_registered_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"MODEL.PARALLEL: .*'wrop'.* did you mean 'wrap'\?"):
        DefaultTrainer(tiny_cfg(tmp_path, "MODEL.PARALLEL", "wrop"))
