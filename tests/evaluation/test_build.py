import pytest
import torch
from torch import nn

from tests.docs.pages import blocks
from trainkit.config import ConfigError, get_cfg
from trainkit.evaluation import (
    EVALUATOR_REGISTRY,
    DatasetEvaluator,
    DatasetEvaluators,
    build_evaluator,
    inference_on_dataset,
)

(WEIGHTED,) = blocks("projects/evaluators/README.md", "yaml")


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
    # the second one is in a project
    both = build_evaluator(config("NamingEvaluator", "LossEvaluator"), "toy")
    assert isinstance(both, DatasetEvaluators)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"TEST.EVALUATORS: .*'toy'"),
        (["LosEvaluator"], "TEST.EVALUATORS: no 'LosEvaluator'"),
        ([{"NAME": "LosEvaluator"}], "TEST.EVALUATORS: no 'LosEvaluator'"),
        (["LossEvaluator", "LossEvaluator"], "TEST.EVALUATORS: got .* each evaluator once"),
        (
            ["ClassificationEvaluator", "ConfusionMatrixEvaluator"],
            "ClassificationEvaluator and ConfusionMatrixEvaluator both report 'classification'",
        ),
        (["LossEvaluator", {"NAME": "LossEvaluator"}], "both report 'loss'; .* another task"),
        ([{"WEIGHT": "num_tokens"}], "TEST.EVALUATORS: got {'WEIGHT': .* accepted: a name, or"),
        ([3], "TEST.EVALUATORS: got 3 .* accepted: a name, or"),
        ([{"NAME": "LossEvaluator", "WIGHT": 1}], "LossEvaluator: .* argument 'wight'"),
        ([{"NAME": "LossEvaluator", "WEIGHT": 1}], "LossEvaluator: weight must be .* got 1"),
    ],
    ids=str,
)
def test_a_config_that_names_no_evaluator_is_an_error(names, message):
    with pytest.raises(ConfigError, match=message):
        build_evaluator(config(*names), "toy")


def test_an_entry_of_a_config_may_have_arguments(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "TEST: {EVALUATORS: [LossEvaluator, {NAME: LossEvaluator, WEIGHT: num_tokens, TASK: per_token}]}"
    )
    cfg = get_cfg()
    cfg.merge_from_file(str(file))
    by_samples, by_tokens = build_evaluator(cfg, "toy").evaluators
    assert [*by_samples.known_results(), *by_tokens.known_results()] == ["loss", "per_token"]
    model, batches = WithTokens(), [torch.full((1, 2), 4.0), torch.full((3, 5), 1.0)]
    results = inference_on_dataset(model, batches, [by_samples, by_tokens])
    file.write_text(WEIGHTED)
    cfg.merge_from_file(str(file))
    assert (
        inference_on_dataset(model, batches, build_evaluator(cfg, "toy"))["loss"]
        == results["per_token"]
    )
    assert results["loss"]["total_loss"] == 1.75  # of 4, 1, 1 and 1
    assert results["per_token"]["total_loss"] == pytest.approx(23 / 17)


class WithTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return {"loss": self.weight * batch.mean(), "num_tokens": torch.tensor(batch.numel())}
