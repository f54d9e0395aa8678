import hashlib
import os

import pytest
import torch
from torch import nn
from trainkit.projects.hooks.publish_weights import publish_weights

from tests.checkpoint.conftest import Counter, linear
from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Steps
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.file import read_file, write_file
from trainkit.engine import DefaultPredictor, DefaultTrainer
from trainkit.engine.hooks import BestCheckpointer, EvalHook, PeriodicCheckpointer, PublishWeights


def values_of(path):
    state = read_file(path)
    assert list(state) == ["model"]
    return {key: value.unique().tolist() for key, value in state["model"].items()}


def test_the_weights_alone_are_published_under_their_digest(tmp_path):
    Checkpointer(linear(1), tmp_path, trainer=Counter({})).save("model_final", iteration=9)
    path = tmp_path / "model_final.pth"
    first = publish_weights(path)
    assert publish_weights(path) == first
    digest = hashlib.sha256((tmp_path / first).read_bytes()).hexdigest()
    assert first == str(tmp_path / f"model_final_published-{digest[:8]}.pth")
    assert values_of(first) == {"weight": [1.0], "bias": [1.0]}
    assert sorted(read_file(path)) == ["iteration", "model", "trainer"]
    assert sorted(os.listdir(tmp_path)) == ["last_checkpoint", path.name, os.path.basename(first)]


def test_averaged_weights_are_published_over_those_of_the_model_and_are_an_error_where_there_are_none(tmp_path):
    path, average = tmp_path / "model_final.pth", {"weight": torch.full((2, 2), 7.0)}
    for hooks in ({}, {"EMAHook": {"steps": 3}}):
        write_file({"model": linear(1).state_dict(), "trainer": {"hooks": hooks}}, path)
        with pytest.raises(CheckpointError, match=r"no weights 'ema' to publish"):
            publish_weights(path, "ema")
        assert os.listdir(tmp_path) == [path.name]
    write_file({"model": linear(1).state_dict(), "trainer": {"hooks": {"EMAHook": {"model": average}}}}, path)
    assert values_of(publish_weights(path, "ema")) == {"weight": [7.0], "bias": [1.0]}


def run_of(folder, *hooks):
    """Evaluated after iterations 1 and 3; a best file of each of two metrics."""
    checkpointer, results = Checkpointer(nn.Linear(1, 1), folder), iter((60.0, 50.0))
    best = [BestCheckpointer(2, checkpointer, "top1")]
    best += [BestCheckpointer(2, checkpointer, "top5", file_prefix="best_top5")]
    evaluate = EvalHook(2, lambda: {"top1": next(results), "top5": 1.0})
    return Steps([PeriodicCheckpointer(checkpointer, 2), evaluate, *best, PublishWeights(), *hooks])


def test_the_final_and_every_best_file_are_published_after_a_run(tmp_path):
    run_of(tmp_path).train(0, 4)

    found = sorted(path.stem.partition("_published-")[0] for path in tmp_path.glob("*_published-????????.pth"))
    assert found == ["best_top5", "model_best", "model_final"]
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


def test_weights_that_cannot_be_published_fail_the_run_and_leave_its_checkpoints(tmp_path):
    damage = AfterStep(lambda trainer: (tmp_path / "model_best.pth").write_bytes(b"broken"))
    damage.priority = "LOWEST"
    trainer = run_of(tmp_path, damage)
    with pytest.raises(CheckpointError, match=r"model_best.pth' is damaged"):
        trainer.train(0, 4)
    assert trainer.status == "failed"
    assert (tmp_path / "model_final.pth").exists()


@pytest.mark.parametrize("format", ["pth", "safetensors"])
def test_published_weights_predict_as_the_final_checkpoint_does(tmp_path, format):
    if format != "pth":
        pytest.importorskip(format)
    cfg = tiny_cfg(tmp_path, "TEST.EVAL_PERIOD", 0, "CHECKPOINT.PUBLISH", "model", "CHECKPOINT.PUBLISH_FORMAT", format)
    DefaultTrainer(cfg).train()
    (path,) = tmp_path.glob(f"model_final_published-*.{format}")

    def predict(weights):
        cfg.MODEL.WEIGHTS = str(weights)
        return DefaultPredictor(cfg)({"x": torch.tensor([1.0, -2.0, 0.5, 3.0])}).tolist()

    assert predict(path) == predict(tmp_path / "model_final.pth")
    assert predict(path) != predict(tmp_path / "model_0000004.pth")
