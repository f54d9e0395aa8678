"""Accuracies, and the confusion matrix."""

import json
import logging

import pytest
import torch
from trainkit.projects.evaluators.classification import ConfusionMatrixEvaluator

from tests.engine.test_no_reads import CountReads
from trainkit.config import get_cfg
from trainkit.evaluation import ClassificationEvaluator
from trainkit.utils.events import EventStorage
from trainkit.utils.run_folder import own_folder, release_folder

# The ranking of the three classes by each sample, best first, and its label.
RANKED = [([0, 1, 2], 0), ([1, 0, 2], 0), ([2, 1, 0], 0), ([1, 2, 0], 1), ([0, 2, 1], 1)]
SCORES = torch.tensor([[2.0 - ranking.index(label) for label in range(3)] for ranking, _ in RANKED])
LABELS = torch.tensor([label for _, label in RANKED])


def evaluate(inputs, outputs=SCORES, evaluator_class=ClassificationEvaluator, **kwargs):
    evaluator = evaluator_class(**kwargs)
    evaluator.process(inputs, outputs)
    return evaluator.evaluate()


@pytest.mark.parametrize("evaluator_class", [ClassificationEvaluator, ConfusionMatrixEvaluator])
def test_accuracies_are_exact_and_in_percent(evaluator_class):
    assert evaluate({"label": LABELS}, SCORES, evaluator_class, topk=(1, 2, 3)) == {
        "classification": {
            "top1": 40.0,  # samples 0 and 3 of 5
            "top2": 60.0,  # and sample 1
            "top3": 100.0,
            "mean_class_accuracy": pytest.approx(41.666667),  # 33.3 and 50; class 2 has no samples
        }
    }


def test_batches_of_all_usual_kinds_are_read():
    expected = evaluate({"label": LABELS})
    samples = [{"target": label} for label in LABELS.tolist()]
    assert evaluate(samples, label_key="target") == expected
    for inputs in (
        {"labels": LABELS},
        [{"labels": label} for label in LABELS],
        {"label": LABELS, "labels": LABELS * 0},
    ):
        assert evaluate(inputs) == expected
    assert (
        evaluate((torch.ones(5, 2), LABELS))
        == evaluate({"label": LABELS}, {"logits": SCORES})
        == expected
    )


def test_counting_a_batch_does_not_wait_for_the_device():
    evaluator = ConfusionMatrixEvaluator(topk=(1, 2))
    with CountReads() as reads:
        evaluator.process({"label": LABELS}, SCORES)
        evaluator.process({"label": LABELS}, SCORES)
    assert not reads.counts
    with reads:
        evaluator.evaluate()
    assert reads.counts


@pytest.mark.parametrize(
    ("inputs", "outputs", "error", "said"),
    [
        ({"image": LABELS}, SCORES, KeyError, "'label'"),
        (LABELS, SCORES, TypeError, "batch must be a mapping with the key 'label'.*got tensor"),
        ({"label": LABELS[:2]}, SCORES, ValueError, r"shape \[5\].*\[2\]"),
        ({"label": LABELS.float()}, SCORES, ValueError, "labels must be integers.*torch.float32"),
        (
            {"label": LABELS},
            SCORES[:, 0],
            TypeError,
            r"must give scores \[N, C\].*got torch.Size\(\[5\]\)",
        ),
        ({"label": LABELS}, {"boxes": SCORES}, TypeError, "'logits' or 'scores'.*boxes"),
        (
            {"label": torch.tensor([0, -1])},
            SCORES[:2],
            ValueError,
            "1 labels are not below 3 classes",
        ),
        (
            {"label": torch.tensor([3, 4])},
            SCORES[:2],
            ValueError,
            "2 labels are not below 3 classes",
        ),
    ],
)
def test_a_batch_of_the_wrong_form_is_an_error_that_says_what_is_accepted(
    inputs, outputs, error, said
):
    with pytest.raises(error, match=said):
        evaluate(inputs, outputs)


def test_the_confusion_matrix_is_logged_and_written_with_what_it_belongs_to(tmp_path, caplog):
    file, names = tmp_path / "confusion.json", ["cat", "dog", "1"]
    caplog.set_level(logging.INFO, logger="trainkit.projects")
    with EventStorage(7):
        evaluate(
            {"label": LABELS},
            SCORES,
            ConfusionMatrixEvaluator,
            class_names=names,
            confusion_file=str(file),
        )
    assert (
        "| cat     |         3 |      33.33 |\n| dog     |         2 |      50.00 |\n"
        in caplog.text
    )
    assert (
        "| label   |   cat |   dog |   1 |\n|:--------|------:|------:|----:|\n| cat     |     1 |"
        in caplog.text
    )
    expected = {"task": "classification", "iteration": 7, "class_names": names}
    assert json.loads(file.read_text()) == expected | {
        "confusion": [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    }


@pytest.mark.parametrize(
    ("num_classes", "is_shown", "is_written"),
    [(10, True, True), (11, False, True), (200, False, True), (201, False, False)],
)
def test_a_large_confusion_matrix_is_not_shown_and_a_larger_one_is_not_written(
    tmp_path, caplog, num_classes, is_shown, is_written
):
    caplog.set_level(logging.INFO, logger="trainkit.projects")
    evaluate(
        {"label": torch.tensor([num_classes - 1])},
        torch.eye(num_classes)[-1:],
        ConfusionMatrixEvaluator,
        confusion_file=str(tmp_path / "large.json"),
    )
    assert any("by their prediction" in text for text in caplog.messages) == is_shown
    assert (tmp_path / "large.json").exists() == is_written


def test_a_confusion_matrix_that_cannot_be_written_is_logged(tmp_path, caplog):
    absent = str(tmp_path / "absent/a.json")
    assert evaluate({"label": LABELS}, SCORES, ConfusionMatrixEvaluator, confusion_file=absent)[
        "classification"
    ]
    assert "The confusion matrix is not written: " in caplog.text


@pytest.mark.parametrize(
    ("is_run", "max_batches", "exists"), [(True, 0, True), (True, 1, False), (False, 0, False)]
)
def test_a_run_writes_the_confusion_matrix_of_all_data(tmp_path, is_run, max_batches, exists):
    cfg = get_cfg()
    cfg.merge_from_list(["OUTPUT_DIR", str(tmp_path), "TEST.MAX_BATCHES", max_batches])
    if is_run:
        own_folder(tmp_path)
    evaluate({"label": LABELS}, SCORES, lambda: ConfusionMatrixEvaluator(cfg, "a/b"))
    release_folder(tmp_path)
    assert (tmp_path / "confusion_a_b.json").exists() == exists
