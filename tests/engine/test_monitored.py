"""Metrics that hooks follow and no evaluation gives."""

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import EvalHook, HookBase
from trainkit.modeling import MODEL_REGISTRY

BEST = "CHECKPOINT.BEST_METRIC"
STOP = "EARLY_STOPPING.METRIC"


def hooks(name, metric):
    return ["HOOKS", [{"NAME": name, "VAL_METRIC": metric}]]


@MODEL_REGISTRY.register()
class Scores(nn.Module):
    """A tiny classifier that fails if it is trained."""

    def __init__(self, cfg):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, batch):
        assert not self.training, "it was trained"
        return self.linear(batch["x"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [BEST, "classification/top1", "TEST.EVALUATORS", []],
            "TEST.EVALUATORS is empty; name .* BestCheckpointer follows the metric 'classification/top1'",
        ),
        ([STOP, "loss/total_loss", "TEST.EVALUATORS", []], "EVALUATORS is empty.* EarlyStopping"),
        (
            [*hooks("ReduceOnPlateau", "loss/total_loss"), "TEST.EVALUATORS", []],
            "EVALUATORS is empty.* ReduceOnPlateau",
        ),
        (
            [*hooks("BestCheckpoints", "loss/total_loss"), "TEST.EVALUATORS", []],
            "EVALUATORS is empty.* BestCheckpoints",
        ),
        (
            [BEST, "classification/top1", "DATASETS.TEST", ()],
            "DATASETS.VAL and DATASETS.TEST are empty; name a dataset",
        ),
        (
            [BEST, "classification/top_1"],
            "give classification/top1, .*did you mean 'classification/top1'",
        ),
        (
            [BEST, ["loss/total_loss", "los/total_loss"]],
            r"loss/\.\.\..* follows the metric 'los/total_loss'",
        ),
        (
            [BEST, "classification/top1", "DATASETS.VAL", ("tiny_val", "tiny_test")],
            "give tiny_val/classification/top1, .*tiny_test/loss",
        ),
        ([STOP, "raw/classification/top1"], "give classification/top1"),
        (
            [STOP, "top1", "TEST.EVAL_PERIOD", 0],
            r"eval_period \(TEST.EVAL_PERIOD in a config\) must be a whole number >= 1, got 0",
        ),
        (
            [*hooks("ReduceOnPlateau", "top1"), "TEST.EVAL_PERIOD", 0],
            "eval_period must be .* >= 1, got 0",
        ),
        (["TEST.EVALUATORS", ["LossEvaluator", "LossEvaluator"]], "each evaluator once"),
        (
            ["TEST.EVALUATORS", ["ClassificationEvaluator", "ConfusionMatrixEvaluator"]],
            "both report 'classification'",
        ),
    ],
)
def test_what_cannot_come_is_refused_before_training(options, message, tmp_path):
    evaluators = ["TEST.EVALUATORS", ["ClassificationEvaluator", "LossEvaluator"]]
    cfg = tiny_cfg(tmp_path, "MODEL.NAME", "Scores", *evaluators, *options)
    with pytest.raises(ConfigError, match=message):
        DefaultTrainer(cfg).train()


class Puts(HookBase):
    def after_step(self):
        self.trainer.storage.put_scalar("mine/score", 1.0)


class WithTest(DefaultTrainer):
    @classmethod
    def test(cls, cfg, model, evaluators=None):
        return {"mine": {"score": 1.0}}


@pytest.mark.parametrize(
    ("trainer_class", "added", "options"),
    [
        (DefaultTrainer, Puts(), ["TEST.EVALUATORS", []]),
        (DefaultTrainer, AfterStep(lambda trainer: Puts.after_step.__get__(Holder(trainer))()), []),
        (DefaultTrainer, EvalHook(5, lambda: {"mine": {"score": 1.0}}), ["DATASETS.TEST", ()]),
        (WithTest, None, ["TEST.EVALUATORS", []]),
    ],
    ids=["hook", "callback", "evaluation", "test"],
)
def test_a_metric_that_something_of_the_users_own_may_store_is_not_refused(
    trainer_class, added, options, tmp_path
):
    trainer = trainer_class(tiny_cfg(tmp_path, BEST, "mine/score", *options))
    trainer.register_hooks([added], priority=None)
    trainer.train()
    assert (tmp_path / "model_best.pth").exists()


class Holder:
    def __init__(self, trainer):
        self.trainer = trainer


@pytest.mark.parametrize(
    "options",
    [
        [BEST, "total_loss"],  # of the training
        [BEST, "raw/classification/top1", "HOOKS", [{"NAME": "EMAHook", "EVALUATE": "both"}]],
        [BEST, "tiny_val/classification/top1", "DATASETS.VAL", ("tiny_val", "tiny_test")],
    ],
)
def test_names_that_come_are_accepted(options, tmp_path):
    evaluators = ["TEST.EVALUATORS", ["ClassificationEvaluator", "LossEvaluator"]]
    DefaultTrainer(tiny_cfg(tmp_path, *evaluators, *options)).train()
    assert (tmp_path / "model_best.pth").exists()


@pytest.mark.parametrize("key", [BEST, STOP])
def test_a_name_that_only_the_evaluation_knows_stops_the_run_saved_and_it_goes_on_with_a_right_name(
    key, tmp_path
):
    """The evaluator of this job does not say before what it reports."""
    options = ["TEST.EVAL_PERIOD", 3, "SOLVER.CHECKPOINT_PERIOD", 100, "STOP_CHECK_PERIOD", 1]
    wrong = DefaultTrainer(tiny_cfg(tmp_path, *options, key, "classification/top_1"))
    with pytest.raises(
        ConfigError,
        match="'classification/top_1'; did you mean 'classification/top1'. known are: class",
    ):
        wrong.train()
    assert wrong.status == "failed"
    weights = {name: value.clone() for name, value in wrong.model.state_dict().items()}
    right = DefaultTrainer(tiny_cfg(tmp_path, *options, key, "classification/top1"))
    right.resume_or_load(resume=True)
    assert 3 <= right.start_iter <= 4
    assert all(torch.equal(right.model.state_dict()[name], weights[name]) for name in weights)
    right.train()
    assert right.status == "finished"


def test_a_wrong_name_at_the_only_evaluation_after_training_leaves_the_final_model(tmp_path):
    cfg = tiny_cfg(tmp_path, "TEST.EVAL_PERIOD", 0, BEST, "classification/top_1")
    with pytest.raises(ConfigError, match="did you mean 'classification/top1'"):
        DefaultTrainer(cfg).train()
    assert (tmp_path / "model_final.pth").exists()
