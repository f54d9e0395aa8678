import pytest

from trainkit.config import ConfigError, get_cfg
from trainkit.evaluation import (
    EVALUATOR_REGISTRY,
    DatasetEvaluator,
    DatasetEvaluators,
    build_evaluator,
)


def config(*names):
    cfg = get_cfg()
    cfg.TEST.EVALUATORS = list(names)
    return cfg


@EVALUATOR_REGISTRY.register()
class NamingEvaluator(DatasetEvaluator):
    def __init__(self, cfg, dataset_name):
        self.arguments = cfg, dataset_name


def test_one_evaluator_is_built_bare_and_several_as_one():
    cfg = config("NamingEvaluator")
    assert build_evaluator(cfg, "toy").arguments == (cfg, "toy")
    both = build_evaluator(
        config("NamingEvaluator", "LossEvaluator"), "toy"
    )  # the second one is in a project
    assert isinstance(both, DatasetEvaluators)


def test_a_config_that_names_no_evaluator_is_an_error():
    for names, message in (
        ([], r"TEST.EVALUATORS: .*'toy'"),
        (["LosEvaluator"], "TEST.EVALUATORS: no 'LosEvaluator'"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_evaluator(config(*names), "toy")
