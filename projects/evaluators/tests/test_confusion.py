import json
import logging

import pytest
import torch
from trainkit.projects.evaluators import ConfusionMatrixEvaluator

from trainkit.config import get_cfg
from trainkit.evaluation import ClassificationEvaluator
from trainkit.utils.events import EventStorage
from trainkit.utils.run_folder import own_folder, release_folder

# The ranking of the three classes by each sample, best first, and its label.
RANKED = [([0, 1, 2], 0), ([1, 0, 2], 0), ([2, 1, 0], 0), ([1, 2, 0], 1), ([0, 2, 1], 1)]
SCORES = torch.tensor([[2.0 - ranking.index(label) for label in range(3)] for ranking, _ in RANKED])
LABELS = torch.tensor([label for _, label in RANKED])


def evaluate(*batches, **kwargs):
    evaluator = ConfusionMatrixEvaluator(**kwargs)
    for inputs, outputs in batches:
        evaluator.process(inputs, outputs)
    return evaluator.evaluate()


@pytest.mark.parametrize("topk", [(1,), (1, 2, 3)])
def test_the_results_are_those_of_the_classification_evaluator(topk):
    expected = ClassificationEvaluator(topk=topk)
    expected.process({"label": LABELS}, SCORES)
    assert evaluate(({"label": LABELS}, SCORES), topk=topk) == expected.evaluate()


def test_the_table_has_samples_and_accuracy_of_each_class(caplog):
    with caplog.at_level(logging.INFO, logger="trainkit.projects"):
        evaluate(({"label": LABELS}, SCORES), class_names=["cat", "dog", "1"])
    assert caplog.messages[:1] == [
        "Accuracy of each class in percent (classification):\n"
        "| class   |   samples |   accuracy |\n"
        "|:--------|----------:|-----------:|\n"
        "| cat     |         3 |      33.33 |\n"
        "| dog     |         2 |      50.00 |\n"
        "| 1       |         0 |          - |"
    ]


def test_the_confusion_matrix_is_logged_and_written_with_what_it_belongs_to(tmp_path, caplog):
    file = tmp_path / "confusion.json"
    with caplog.at_level(logging.INFO, logger="trainkit.projects"):
        evaluate(({"label": LABELS}, SCORES), class_names=["cat", "dog", "1"], confusion_file=str(file))
    assert caplog.messages[1:] == [
        "Samples of each label by their prediction (classification):\n"
        "| label   |   cat |   dog |   1 |\n"
        "|:--------|------:|------:|----:|\n"
        "| cat     |     1 |     1 |   1 |\n"
        "| dog     |     1 |     1 |   0 |\n"
        "| 1       |     0 |     0 |   0 |"
    ]
    expected = {"task": "classification", "iteration": None, "class_names": ["cat", "dog", "1"]}
    assert json.loads(file.read_text()) == expected | {"confusion": [[1, 1, 1], [1, 1, 0], [0, 0, 0]]}
    with EventStorage(7):
        evaluate(({"label": LABELS}, SCORES), confusion_file=str(file))
    assert json.loads(file.read_text())["iteration"] == 7


def test_a_large_confusion_matrix_is_not_shown_and_one_that_cannot_be_written_is_logged(tmp_path, caplog):
    labels = {"label": torch.tensor([200])}
    with caplog.at_level(logging.INFO, logger="trainkit.projects"):
        evaluate((labels, torch.eye(201)[200:]), confusion_file=str(tmp_path / "large.json"))
    assert not any("by their prediction" in text for text in caplog.messages)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    assert evaluate(({"label": LABELS}, SCORES), confusion_file=str(tmp_path / "file/a.json"))["classification"]
    assert "The confusion matrix is not written: " in caplog.text


@pytest.mark.parametrize(("is_run", "max_batches", "exists"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_a_run_writes_the_confusion_matrix_of_all_data(tmp_path, is_run, max_batches, exists):
    cfg = get_cfg()
    cfg.merge_from_list(["OUTPUT_DIR", str(tmp_path), "TEST.MAX_BATCHES", max_batches])
    if is_run:
        own_folder(tmp_path)
    evaluator = ConfusionMatrixEvaluator(cfg, "a/b")
    evaluator.process({"label": LABELS}, SCORES)
    evaluator.evaluate()
    release_folder(tmp_path)
    assert (tmp_path / "confusion_a_b.json").exists() == exists
