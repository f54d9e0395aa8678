"""Hooks that act in an evaluation do the same under ``--eval-only`` as at the end of the training run."""

import pytest
import torch
from torch.utils.data import default_collate

from projects.digits import DigitsCNN, DigitsTransform, load_split
from tests.tools.digits_run import evaluate, in_one_piece
from tools import train_net
from trainkit.config import get_cfg
from trainkit.engine import DefaultPredictor

OURS = ["IMPORTS", ["projects.digits", "tests.tools.digits_hooks"]]


def averaging(evaluate):
    return {"NAME": "EMAHook", "DECAY": 0.9, "EVALUATE": evaluate}


DRAWING = {"NAME": "VisualizationHook", "DRAW": "first_scan", "PERIOD": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has evaluated both, and drawn the first batches."""
    options = [
        *OURS,
        "HOOKS",
        [averaging("both"), DRAWING],
        "TEST.EVALUATORS",
        ["LossEvaluator"],
        "TEST.EVAL_PERIOD",
        0,
    ]
    return in_one_piece(tmp_path_factory.mktemp("trained"), *options)


def evaluated(run, *options):
    """What ``--eval-only`` gives, without the names of tasks."""
    return evaluate(run.folder, *OURS, "TEST.EVALUATORS", ["LossEvaluator"], *options)


def last(run, prefix):
    """The losses on the test data that a metric's name starts with, after training."""
    return {name: run.metric(f"{prefix}/{name}")[12] for name in ("total_loss", "loss_cls")}


def test_both_results_are_those_of_the_end_of_training(trained):
    averaged, raw = last(trained, "test/loss"), last(trained, "test/raw/loss")
    assert averaged != raw

    assert evaluated(trained, "HOOKS", [averaging("both")]) == {"loss": averaged, "raw": {"loss": raw}}
    assert evaluated(trained, "HOOKS", [averaging("ema")]) == {"loss": averaged}
    assert evaluated(trained, "HOOKS", [averaging("raw")]) == {"loss": raw}
    assert evaluated(trained) == {"loss": raw}


def test_a_weights_file_is_evaluated_like_the_last_checkpoint(trained, tmp_path):
    options = ["HOOKS", [averaging("both")], "MODEL.WEIGHTS", trained.folder / "model_final.pth"]

    results = evaluate(tmp_path, *OURS, "TEST.EVALUATORS", ["LossEvaluator"], *options)

    assert results == {"loss": last(trained, "test/loss"), "raw": {"loss": last(trained, "test/raw/loss")}}


def test_pictures_are_those_of_the_end_of_training(trained, tmp_path):
    drawn = {path.name: path.read_bytes() for path in (trained.folder / "visualization/test").iterdir()}
    averaged, raw = "digits_test_iter0000012_batch0001.png", "digits_test_2_iter0000012_batch0001.png"
    assert drawn[averaged] != drawn[raw]

    evaluated(trained, "HOOKS", [averaging("both"), {**DRAWING, "OUTPUT_DIR": str(tmp_path)}])

    again = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*.png")}
    assert again == {f"test/{name}": content for name, content in drawn.items()}


def logits(weights, samples):
    model = DigitsCNN(width=2).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(default_collate([DigitsTransform()(sample) for sample in samples]))


def test_the_predictor_uses_the_averaged_weights_where_the_config_evaluates_them(trained):
    samples = load_split("test")[:3]
    state = trained.checkpoint()
    raw = logits(state["model"], samples)
    averaged = logits(state["trainer"]["hooks"]["EMAHook"]["model"], samples)
    assert not torch.equal(raw, averaged)
    cfg = get_cfg()
    cfg.merge_from_file(str(train_net.DEFAULT_CONFIG))
    cfg.merge_from_list(["MODEL.WIDTH", 2, "MODEL.WEIGHTS", str(trained.folder / "model_final.pth")])

    for hooks, expected in (
        ([averaging("ema")], averaged),
        ([averaging("both")], averaged),
        ([averaging("raw")], raw),
        ([averaging("ema") | {"ENABLED": False}], raw),
        ([], raw),
    ):
        cfg.HOOKS = hooks
        assert torch.equal(torch.stack(DefaultPredictor(cfg)(samples)), expected)
