"""Hooks that act in an evaluation do the same under ``--eval-only`` as at the end of the training run."""

import pytest

from tests.tools.digits_run import evaluate, in_one_piece

OURS = ["IMPORTS", ["projects.digits", "tests.tools.digits_hooks"]]


def averaging(evaluate):
    return {"NAME": "EMAHook", "DECAY": 0.9, "EVALUATE": evaluate}


DRAWING = {"NAME": "VisualizationHook", "DRAW": "first_scan", "PERIOD": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has evaluated both, and drawn the first batches."""
    options = [*OURS, "HOOKS", [averaging("both"), DRAWING], "TEST.EVALUATORS", ["LossEvaluator"]]
    return in_one_piece(tmp_path_factory.mktemp("trained"), *options, "TEST.EVAL_PERIOD", 0)


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
    weights = ("MODEL.WEIGHTS", trained.folder / "model_final.pth")
    assert evaluated(trained, "HOOKS", [averaging("ema")], *weights) == {"loss": averaged}


def test_pictures_are_those_of_the_end_of_training(trained, tmp_path):
    drawn = {path.name: path.read_bytes() for path in (trained.folder / "visualization/test").iterdir()}
    assert sorted(drawn) == [f"digits_test_iter0000012_batch000{batch}.png" for batch in (1, 3)]

    evaluated(trained, "HOOKS", [averaging("both"), {**DRAWING, "OUTPUT_DIR": str(tmp_path)}])

    again = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*.png")}
    assert again == {f"test/{name}": content for name, content in drawn.items()}
