"""The registries of `trainkit.engine.build`."""

import pytest

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.engine.build import WRAPPER_REGISTRY
from trainkit.engine.entry import EvaluationRun


@WRAPPER_REGISTRY.register()
def wrap(cfg, build):
    """Asks the trainer for a name."""
    model = build(cfg)
    model.name = build.trainer.name_of(cfg)
    return model


class Trainer(DefaultTrainer):
    @classmethod
    def name_of(cls, cfg):
        return f"{cls.__name__} of {cfg.MODEL.NAME}"


@pytest.mark.parametrize("make", [Trainer, lambda cfg: EvaluationRun(cfg, Trainer)], ids=["training", "evaluation"])
def test_a_wrapper_builds_the_model_and_may_call_methods_of_the_trainer(make, tmp_path):
    model = make(tiny_cfg(tmp_path, "MODEL.PARALLEL", "wrap")).model
    assert (model.name, type(model).__name__) == ("Trainer of TinyClassifier", "TinyClassifier")
    with pytest.raises(ConfigError, match=r"MODEL.PARALLEL: .*'wrop'.* did you mean 'wrap'\?"):
        make(tiny_cfg(tmp_path, "MODEL.PARALLEL", "wrop"))
