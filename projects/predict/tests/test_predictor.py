"""DefaultPredictor, with averaged weights and without."""

import logging
import shutil

import pytest
import torch
from torch import nn

from tests.docs.pages import blocks, run
from tests.engine.job import TinyClassifier, tiny_cfg
from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file
from trainkit.config import ConfigError
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultPredictor, DefaultTrainer, EvaluationRun
from trainkit.evaluation import EVALUATOR_REGISTRY, DatasetEvaluator, inference_on_dataset
from trainkit.modeling import MODEL_REGISTRY

EMA = {"NAME": "EMAHook", "DECAY": 0.5}
(EXAMPLE,) = blocks("projects/predict/README.md", "python")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("trained")
    DefaultTrainer(tiny_cfg(output_dir, "HOOKS", [EMA])).train()
    return output_dir / "model_final.pth"


def test_the_example_predicts(trained, tmp_path, monkeypatch):
    (tmp_path / "output").symlink_to(trained.parent)
    shutil.copy(trained, trained.with_name("model_best.pth"))
    monkeypatch.chdir(tmp_path)
    found = run(
        EXAMPLE, "README.md", cfg=tiny_cfg(tmp_path), sample=DatasetCatalog.get("tiny_test")[0]
    )
    assert found["outputs"].shape == (2,)


class Keep(DatasetEvaluator):
    def __init__(self):
        self.outputs = []

    def process(self, inputs, outputs):
        self.outputs += list(outputs)


def test_a_prediction_is_what_evaluation_gets_for_the_same_sample(trained, tmp_path):
    cfg = tiny_cfg(tmp_path, "MODEL.WEIGHTS", str(trained))
    predictor, keep, samples = DefaultPredictor(cfg), Keep(), DatasetCatalog.get("tiny_test")
    inference_on_dataset(predictor.model, DefaultTrainer.build_test_loader(cfg, "tiny_test"), keep)
    torch.testing.assert_close(torch.stack(predictor(samples)), torch.stack(keep.outputs))
    torch.testing.assert_close(predictor(samples[3]), keep.outputs[3])
    assert not predictor(samples[3]).requires_grad
    assert predictor([]) == []
    first = next(iter(DefaultTrainer.build_test_loader(cfg, "tiny_test")))  # its own collate
    of_batch = predictor.predict_batch(first, 3)
    torch.testing.assert_close(torch.stack(of_batch), torch.stack(keep.outputs[:3]))


def test_a_predictor_without_weights_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="MODEL.WEIGHTS is empty"):
        DefaultPredictor(tiny_cfg(tmp_path))
    with pytest.raises(CheckpointError, match="no.pth"):
        DefaultPredictor(tiny_cfg(tmp_path, "MODEL.WEIGHTS", "no.pth"))


@pytest.mark.parametrize(
    ("hooks", "averaged"),
    [
        ([{**EMA, "EVALUATE": "both"}], True),
        ([{**EMA, "EVALUATE": "raw"}], False),
        ([{**EMA, "ENABLED": False}], False),
        ([{"NAME": "TorchMemoryStats"}], False),
    ],
    ids=str,
)
def test_the_weights_are_those_that_the_config_evaluates(
    trained, tmp_path, hooks, averaged, caplog
):
    state, model = read_file(trained), TinyClassifier(None).eval()
    model.load_state_dict(
        state["trainer"]["hooks"]["EMAHook"]["model"] if averaged else state["model"]
    )
    samples = DatasetCatalog.get("tiny_test")
    found = DefaultPredictor(tiny_cfg(tmp_path, "MODEL.WEIGHTS", str(trained), "HOOKS", hooks))(
        samples
    )
    with torch.no_grad():
        assert torch.equal(
            torch.stack(found), model({"x": torch.stack([sample["x"] / 2 for sample in samples])})
        )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# ---------------------------------------------------------------------- best checkpoints hold what was scored


@MODEL_REGISTRY.register()
class Falling(nn.Module):
    """Its weight is 0, -1, -2, ... after the updates; in evaluations it returns that."""

    def __init__(self, cfg):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return self.weight * 1 if self.training else self.weight.expand(len(batch["x"]))


@EVALUATOR_REGISTRY.register()
class MeanOutput(Keep):
    def __init__(self, cfg, dataset_name):
        super().__init__()

    def reset(self):
        self.outputs = []

    def evaluate(self):
        return {"weight": {"value": torch.stack(self.outputs).mean().item()}}


MEAN = {"NAME": "EMAHook", "KIND": "mean"}
AVERAGE, RAW = -0.5, -1.0  # after two updates: the mean of 0 and -1, and -1


def falling_cfg(folder, hooks, *options):
    """The best value is the one after two of four updates."""
    optimization = (
        "SOLVER.BASE_LR",
        1.0,
        "SOLVER.WARMUP_ITERS",
        0,
        "SOLVER.STEPS",
        (),
        "SOLVER.MOMENTUM",
        0.0,
    )
    best = (
        "CHECKPOINT.BEST_METRIC",
        "weight/value",
        "CHECKPOINT.BEST_MODE",
        "max",
        "TEST.EVAL_PERIOD",
        2,
    )
    job = (
        "MODEL.NAME",
        "Falling",
        "SOLVER.MAX_ITER",
        4,
        "TEST.EVALUATORS",
        ["MeanOutput"],
        "HOOKS",
        hooks,
    )
    return tiny_cfg(folder, *optimization, *best, *job, "SOLVER.WEIGHT_DECAY", 0.0, *options)


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    folder = tmp_path_factory.mktemp("falling")
    DefaultTrainer(falling_cfg(folder, [MEAN])).train()
    return folder / "model_best.pth"


def test_a_best_checkpoint_holds_the_weights_that_were_scored_and_says_which(best):
    state = read_file(best)
    assert state["trainer"]["hooks"]["BestCheckpointer"]["best"] == AVERAGE
    assert state["evaluated"] == "ema"
    assert state["model"]["weight"].item() == AVERAGE
    assert state["trained_model"]["weight"].item() == RAW
    final = read_file(best.with_name("model_final.pth"))
    assert "evaluated" not in final
    assert final["model"]["weight"].item() == -3.0


@pytest.mark.parametrize("hooks", [[MEAN], [], [{**MEAN, "EVALUATE": "raw"}]], ids=str)
def test_a_predictor_and_eval_only_use_the_weights_that_the_file_was_chosen_by(
    best, tmp_path, hooks
):
    cfg = falling_cfg(tmp_path, hooks, "MODEL.WEIGHTS", str(best))
    assert DefaultPredictor(cfg)({"x": torch.zeros(4)}).item() == AVERAGE
    assert EvaluationRun(cfg, DefaultTrainer).run() == {"weight": {"value": AVERAGE}}


@pytest.mark.parametrize("hooks", [[MEAN], []], ids=["with the hook", "without it"])
def test_a_run_that_is_resumed_from_a_best_checkpoint_goes_on_with_the_weights_that_were_trained(
    best, tmp_path, hooks
):
    shutil.copy(best, tmp_path)
    (tmp_path / "last_checkpoint").write_text("model_best.pth")
    trainer = DefaultTrainer(falling_cfg(tmp_path, hooks))
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 2
    assert trainer.model.weight.item() == RAW
    trainer.train()
    whole, parts = (read_file(folder / "model_final.pth") for folder in (best.parent, tmp_path))
    assert parts["model"]["weight"] == whole["model"]["weight"] == -3
    if hooks:
        average = [
            state["trainer"]["hooks"]["EMAHook"]["model"]["weight"].item()
            for state in (whole, parts)
        ]
        assert average == [-1.5, -1.5]


def test_a_model_of_a_trainer_class_is_built_by_it_and_the_error_says_so(trained, tmp_path):
    class Trainer(DefaultTrainer):
        @classmethod
        def build_model(cls, cfg):
            return TinyClassifier(cfg)

    cfg = tiny_cfg(tmp_path, "MODEL.WEIGHTS", str(trained), "MODEL.NAME", "")
    with pytest.raises(ConfigError, match=r"DefaultPredictor\(cfg, Trainer.build_model\)"):
        DefaultPredictor(cfg)
    sample = DatasetCatalog.get("tiny_test")[0]
    by_name = DefaultPredictor(tiny_cfg(tmp_path, "MODEL.WEIGHTS", str(trained)))(sample)
    assert torch.equal(DefaultPredictor(cfg, Trainer.build_model)(sample), by_name)
