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
from trainkit.engine import DefaultPredictor, DefaultTrainer, EvaluationRun, HookBase
from trainkit.engine.hooks import HOOK_REGISTRY
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
    found = run(EXAMPLE, "README.md", cfg=tiny_cfg(tmp_path), sample=DatasetCatalog.get("tiny_test")[0])
    assert found["outputs"].shape == (2,)


def expected(weights):
    model = TinyClassifier(None).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model({"x": torch.stack([sample["x"] / 2 for sample in DatasetCatalog.get("tiny_test")])})


def predicted(cfg):
    return torch.stack(DefaultPredictor(cfg)(DatasetCatalog.get("tiny_test")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("plain")
    DefaultTrainer(tiny_cfg(output_dir)).train()
    return str(output_dir / "model_final.pth")


def test_a_prediction_is_what_evaluation_gets_for_the_same_sample(plain, tmp_path):
    class Keep(DatasetEvaluator):
        def __init__(self):
            self.outputs = []

        def process(self, inputs, outputs):
            self.outputs += list(outputs)

    cfg = tiny_cfg(tmp_path, "MODEL.WEIGHTS", plain)
    predictor = DefaultPredictor(cfg)
    keep = Keep()
    inference_on_dataset(predictor.model, DefaultTrainer.build_test_loader(cfg, "tiny_test"), keep)
    samples = DatasetCatalog.get("tiny_test")
    torch.testing.assert_close(torch.stack(predictor(samples)), torch.stack(keep.outputs))
    torch.testing.assert_close(predictor(samples[3]), keep.outputs[3])
    assert not predictor(samples[3]).requires_grad


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [("", ConfigError, "MODEL.WEIGHTS is empty"), ("no.pth", CheckpointError, "no.pth")],
)
def test_a_predictor_without_weights_is_an_error(tmp_path, weights, error, message):
    with pytest.raises(error, match=message):
        DefaultPredictor(tiny_cfg(tmp_path, "MODEL.WEIGHTS", weights))


@pytest.mark.parametrize(
    ("hooks", "averaged"),
    [
        ([EMA], True),
        ([{**EMA, "EVALUATE": "both"}], True),
        ([{**EMA, "EVALUATE": "raw"}], False),
        ([{**EMA, "ENABLED": False}], False),
        ([{"NAME": "TorchMemoryStats"}], False),
        ([], False),
    ],
    ids=str,
)
def test_the_weights_are_those_that_the_config_evaluates(trained, tmp_path, hooks, averaged, caplog):
    state = read_file(trained)
    average = state["trainer"]["hooks"]["EMAHook"]["model"]
    right, wrong = (average, state["model"]) if averaged else (state["model"], average)
    found = predicted(tiny_cfg(tmp_path, "MODEL.WEIGHTS", str(trained), "HOOKS", hooks))
    assert torch.equal(found, expected(right))
    assert not torch.allclose(found, expected(wrong))
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
class MeanOutput(DatasetEvaluator):
    def __init__(self, cfg, dataset_name):
        self.reset()

    def reset(self):
        self.outputs = []

    def process(self, inputs, outputs):
        self.outputs += outputs.tolist()

    def evaluate(self):
        return {"weight": {"value": sum(self.outputs) / len(self.outputs)}}


@HOOK_REGISTRY.register()
class WatchesEvaluations(HookBase):
    def after_eval(self, phase, name, results):
        pass


MEAN = {"NAME": "EMAHook", "KIND": "mean"}
AVERAGE, RAW = -0.5, -1.0  # after two updates: the mean of 0 and -1, and -1


def falling_cfg(folder, hooks, *options):
    """The best value is the one after two of four updates."""
    optimization = ("SOLVER.BASE_LR", 1.0, "SOLVER.WARMUP_ITERS", 0, "SOLVER.STEPS", (), "SOLVER.MOMENTUM", 0.0)
    best = ("CHECKPOINT.BEST_METRIC", "weight/value", "CHECKPOINT.BEST_MODE", "max", "TEST.EVAL_PERIOD", 2)
    job = ("MODEL.NAME", "Falling", "SOLVER.MAX_ITER", 4, "TEST.EVALUATORS", ["MeanOutput"], "HOOKS", hooks)
    return tiny_cfg(folder, *optimization, *best, *job, "SOLVER.WEIGHT_DECAY", 0.0, *options)


def weight_of(trainer):
    return trainer.model.weight.item()


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    folder = tmp_path_factory.mktemp("falling")
    DefaultTrainer(falling_cfg(folder, [MEAN])).train()
    return folder / "model_best.pth"


def test_a_best_checkpoint_holds_the_weights_that_were_scored_and_says_which(best):
    state = read_file(best)
    assert state["trainer"]["hooks"]["BestCheckpointer"]["best"] == AVERAGE
    assert (state["evaluated"], state["model"]["weight"].item()) == ("ema", AVERAGE)
    assert state["trained_model"]["weight"].item() == RAW
    final = read_file(best.with_name("model_final.pth"))
    assert ("evaluated" in final, final["model"]["weight"].item()) == (False, -3.0)


USERS = [[MEAN], [], [{**MEAN, "ENABLED": False}], [{"NAME": "WatchesEvaluations"}]]


@pytest.mark.parametrize("hooks", [*USERS, [{**MEAN, "EVALUATE": "raw"}]], ids=str)
def test_a_predictor_uses_the_weights_that_the_file_was_chosen_by(best, tmp_path, hooks):
    predictor = DefaultPredictor(falling_cfg(tmp_path, hooks, "MODEL.WEIGHTS", str(best)))
    assert predictor({"x": torch.zeros(4)}).item() == AVERAGE


@pytest.mark.parametrize("hooks", [*USERS, [{**MEAN, "EVALUATE": "raw"}]], ids=str)
def test_eval_only_evaluates_the_weights_that_the_file_was_chosen_by(best, tmp_path, hooks):
    cfg = falling_cfg(tmp_path, hooks, "MODEL.WEIGHTS", str(best))
    assert EvaluationRun(cfg, DefaultTrainer).run() == {"weight": {"value": AVERAGE}}


@pytest.mark.parametrize("hooks", [[MEAN], []], ids=["with the hook", "without it"])
def test_a_run_that_is_resumed_from_a_best_checkpoint_goes_on_with_the_weights_that_were_trained(best, tmp_path, hooks):
    shutil.copy(best, tmp_path)
    (tmp_path / "last_checkpoint").write_text("model_best.pth")
    trainer = DefaultTrainer(falling_cfg(tmp_path, hooks))
    trainer.resume_or_load(resume=True)
    assert (trainer.start_iter, weight_of(trainer)) == (2, RAW)
    trainer.train()
    whole, parts = (read_file(folder / "model_final.pth") for folder in (best.parent, tmp_path))
    assert parts["model"]["weight"] == whole["model"]["weight"] == -3
    if hooks:
        average = [state["trainer"]["hooks"]["EMAHook"]["model"]["weight"].item() for state in (whole, parts)]
        assert average == [-1.5, -1.5]
