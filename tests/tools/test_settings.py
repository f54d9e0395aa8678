"""Hooks and evaluations, switched on by the config of a digits job; tests/engine/hooks changes the default ones.

The run consists of two ``train()`` calls, a save, a load in a new trainer and a third call: it ends after 4, 8 and 12
iterations. An epoch is 3 iterations.
"""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

from projects.digits import DigitsCNN, DigitsTransform, load_split
from tests.tools.digits_run import MAX_ITER, in_one_piece, in_pieces
from trainkit.checkpoint.format import make_format
from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY

pytestmark = pytest.mark.slow
LOSS = "loss/total_loss"  # an evaluation result
SMALL = [  # a tenth of the data in a tenth of the time
    *("DATALOADER.SAMPLER_TRAIN", "RandomSubsetTrainingSampler", "DATALOADER.RANDOM_SUBSET_RATIO", 0.1),
    *("SOLVER.IMS_PER_BATCH", 40, "TEST.EVALUATORS", ["LossEvaluator"]),
]


@HOOK_REGISTRY.register()
class Probe(HookBase):
    """Store the ``square`` of the iteration."""

    def __init__(self, factor: float = 1.0) -> None:
        self._factor = factor

    def after_step(self) -> None:
        self.trainer.storage.put_scalar("square", self._factor * self.trainer.iter**2)


def loss_of(weights, num_samples):
    """The loss on the validation data, computed anew."""
    model = DigitsCNN(width=2).eval()
    model.load_state_dict(weights)
    batch = default_collate([DigitsTransform()(sample) for sample in load_split("val")[:num_samples]])
    with torch.no_grad():
        return pytest.approx(F.cross_entropy(model(batch), batch["label"], label_smoothing=0.1).item(), rel=1e-5)


def published(run):
    return [name for name in run.files if name.startswith("model_final_published-")]


def test_a_hook_of_ones_own_averaged_weights_and_schedules_survive_two_calls_of_train_and_a_resume(tmp_path):
    hooks = [{"NAME": "EMAHook", "DECAY": 0.9, "BEGIN": "1ep", "EVALUATE": "both"}, {"NAME": "Probe", "FACTOR": 2.0}]
    schedules = [{"NAME": "Linear", "END": 5, "START_FACTOR": 0.2}]
    schedules += [{"NAME": "Step", "BEGIN": 5, "STEP_SIZE": "1ep", "GAMMA": 0.5}]
    run = in_pieces(tmp_path, *SMALL, "HOOKS", hooks, "SOLVER.SCHEDULES", schedules, "CHECKPOINT.PUBLISH", "ema")

    iters = range(MAX_ITER)
    assert run.metric("square") == {t: 2 * t**2 for t in iters}
    rates = {t: 0.1 * (0.2 + 0.2 * t if t < 5 else 0.5 ** ((t - 5) // 3)) for t in iters}
    assert run.metric("lr") == pytest.approx(rates)
    final = run.checkpoint()
    assert run.metric(LOSS)[12] == loss_of(final["trainer"]["hooks"]["EMAHook"]["model"], 200)
    assert run.metric(f"raw/{LOSS}")[12] == loss_of(final["model"], 200)
    assert len(published(run)) == 1


def test_the_keys_of_evaluations_and_checkpoints_survive_two_calls_of_train_and_a_resume(tmp_path):
    options = ["TEST.EVAL_PERIOD", "1ep", "TEST.EVAL_AT_START", True, "TEST.MAX_BATCHES", 1]
    options += ["TEST.EXPECTED_RESULTS", [["loss", "total_loss", 2, 2]]]
    options += ["CHECKPOINT.BEST_METRIC", LOSS, "CHECKPOINT.BEST_TO_KEEP", 2, "CHECKPOINT.BEST_MODE", "max"]
    options += ["EARLY_STOPPING.METRIC", LOSS, "EARLY_STOPPING.MODE", "max", "EARLY_STOPPING.PATIENCE", 2]
    options += ["LOG.WRITERS", ["console", "json", "tensorboard"], "CHECKPOINT.PUBLISH", "model"]
    options += ["CHECKPOINT.PUBLISH_FORMAT", "safetensors", "CHECKPOINT.MAX_TO_KEEP", 1, "CHECKPOINT.START", 1]
    run = in_pieces(tmp_path, *SMALL, *options)

    assert [*run.metric(LOSS)] == [0, 2, 4, 5, 8]  # at the start, in each epoch, at the end of a call and at the stop
    weights = run.checkpoint()["model"]
    assert run.metric(LOSS)[8] == loss_of(weights, 100)
    for text in ("Results agree with TEST.EXPECTED_RESULTS", f"{LOSS} has not been better", "  total_loss: "):
        assert text in run.log
    for text, number in (("model_best_0", 2), ("model_0", 1), ("events.out.tfevents", 3)):
        assert len([name for name in run.files if text in name]) == number
    (name,) = published(run)
    written = make_format("safetensors").read(run.folder / name)["model"]
    assert all(torch.equal(value, weights[key]) for key, value in written.items())
    plain = in_one_piece(tmp_path / "plain", *SMALL)
    assert ([*plain.metric(LOSS)], published(plain)) == ([3, 7, 12], [])
