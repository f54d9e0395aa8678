import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Steps
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.file import read_file
from trainkit.engine import DefaultPredictor, DefaultTrainer
from trainkit.engine.hooks import BestCheckpointer, EvalHook, HookBase, PeriodicCheckpointer, PublishWeights


class EMAHook(HookBase):
    """Has an average of ``model``: all zeros."""

    def __init__(self, model):
        self._average = {key: value.clone().zero_() for key, value in model.state_dict().items()}

    def state_dict(self):
        return {"model": self._average}

    def load_state_dict(self, state_dict):
        self._average = state_dict["model"]


def make(folder, values=(50.0, 60.0), weights="model", *, save_last=True, ema=False, **steps):
    """Evaluated every 2nd iteration; a best file of each of two metrics."""
    model = nn.Linear(1, 1)
    checkpointer = Checkpointer(model, folder)
    results = iter(values)
    trainer = Steps(
        [
            EMAHook(model) if ema else None,
            PeriodicCheckpointer(checkpointer, 2, save_last=save_last),
            EvalHook(2, lambda: {"top1": next(results), "top5": 1.0}),
            BestCheckpointer(2, checkpointer, "top1"),
            BestCheckpointer(2, checkpointer, "top5", file_prefix="best_top5"),
            PublishWeights(weights),
        ],
        **steps,
    )
    checkpointer.add_checkpointable("trainer", trainer)
    return trainer


def published(folder):
    return sorted(path.stem.partition("_published-")[0] for path in folder.glob("*_published-????????.pth"))


def test_the_final_and_every_best_file_are_published_after_a_run(tmp_path):
    make(tmp_path).train(0, 4)

    assert published(tmp_path) == ["best_top5", "model_best", "model_final"]
    for path in tmp_path.glob("*_published-*.pth"):
        assert list(read_file(path)) == ["model"]
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


def test_weights_that_cannot_be_published_fail_the_run_and_leave_its_checkpoints(tmp_path):
    trainer = make(tmp_path, [60.0, 50.0], "ema", ema=True)
    trainer.register_hooks([AfterStep(lambda trainer: (tmp_path / "model_best.pth").write_bytes(b"broken"))])
    with pytest.raises(CheckpointError, match=r"weights could not be published: .*model_best.pth' is damaged"):
        trainer.train(0, 3)

    assert trainer.status == "failed"
    assert (tmp_path / "model_final.pth").exists()


@pytest.mark.parametrize("format", ["pth", "safetensors"])
def test_published_weights_predict_as_the_final_checkpoint_does(tmp_path, format):
    if format != "pth":
        pytest.importorskip(format)
    cfg = tiny_cfg(tmp_path, "TEST.EVAL_PERIOD", 0, "CHECKPOINT.PUBLISH", "model", "CHECKPOINT.PUBLISH_FORMAT", format)
    trainer = DefaultTrainer(cfg)
    trainer.train()
    (path,) = tmp_path.glob(f"model_final_published-*.{format}")

    def predict(weights):
        cfg.MODEL.WEIGHTS = str(weights)
        return DefaultPredictor(cfg)({"x": torch.tensor([1.0, -2.0, 0.5, 3.0])}).tolist()

    assert predict(path) == predict(tmp_path / "model_final.pth")
    assert predict(path) != predict(tmp_path / "model_0000004.pth")
