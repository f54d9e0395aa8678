import logging
import math

import pytest
import torch

from trainkit.config import get_cfg
from trainkit.data import Metadata, MetadataCatalog
from trainkit.evaluation import SemSegEvaluator, build_evaluator

# One picture of 2 x 5 pixels. Of class 0 two pixels of three are found, of class 1 three of five, of class 2 none of
# two; class 3 is predicted once, and class 4 is nowhere.
LABELS = torch.tensor([[[0, 0, 0, 1, 1], [1, 1, 1, 2, 2]]])
PREDICTED = torch.tensor([[[0, 0, 1, 1, 1], [1, 0, 3, 0, 1]]])
SCORES = torch.nn.functional.one_hot(PREDICTED, 5).permute(0, 3, 1, 2).float()


def results(iou, all_accuracy, mean_accuracy):
    seen = [value for value in iou if not math.isnan(value)]
    means = {"mIoU": sum(seen) / len(seen), "aAcc": all_accuracy, "mAcc": mean_accuracy}
    by_class = {f"IoU-{label}": value for label, value in enumerate(iou)}
    return {
        name: pytest.approx(value, rel=1e-14, nan_ok=True)
        for name, value in {**means, **by_class}.items()
    }


# IoU is right / (labelled + predicted - right); the mean accuracy is that of the three classes that are labelled
RESULTS = results(
    [100 * 2 / 5, 100 * 3 / 7, 0.0, 0.0, math.nan], 50.0, (100 * 2 / 3 + 100 * 3 / 5 + 0.0) / 3
)


def evaluate(*batches, **kwargs):
    evaluator = SemSegEvaluator(**kwargs)
    for labels, scores in batches:
        evaluator.process({"label": labels}, scores)
    return evaluator.evaluate()["sem_seg"]


def test_the_results_are_those_of_the_confusion_matrix_in_percent_of_batches_of_any_size():
    assert evaluate((LABELS, SCORES)) == RESULTS
    split = [(LABELS[..., :1], SCORES[..., :1]), (LABELS[..., 1:], SCORES[..., 1:])]
    assert evaluate(*split) == RESULTS
    assert evaluate(*split, (torch.cat([LABELS, LABELS]), torch.cat([SCORES, SCORES]))) == RESULTS
    assert evaluate(split[1]) != RESULTS


@pytest.mark.parametrize("ignore_label", [255, -1, 3])
def test_pixels_with_the_ignore_label_do_not_count(ignore_label):
    labels = LABELS.clone()
    labels[0, 1, 1:] = ignore_label  # four pixels, of which none is right
    iou = [100 * 2 / 3, 100 * 3 / 4, math.nan, math.nan, math.nan]
    expected = results(iou, 100 * 5 / 6, (100 * 2 / 3 + 100) / 2)
    assert evaluate((labels, SCORES), ignore_label=ignore_label) == expected


def test_the_metadata_of_a_data_set_name_the_classes_and_what_is_ignored(caplog):
    MetadataCatalog.get("evaluated_canvases").set(
        class_names=["paper", "a", "b", "c", "d"], ignore_label=2
    )
    cfg = get_cfg()
    cfg.TEST.EVALUATORS = ["SemSegEvaluator"]
    evaluator = build_evaluator(cfg, "evaluated_canvases")
    evaluator.process({"label": LABELS}, SCORES)
    with caplog.at_level(logging.INFO, logger="trainkit.projects"):
        found = evaluator.evaluate()["sem_seg"]
    assert [*found] == ["mIoU", "aAcc", "mAcc", "IoU-paper", "IoU-a", "IoU-b", "IoU-c", "IoU-d"]
    assert found["aAcc"] == 100 * 5 / 8
    assert (
        "| a       |        5 | 50.00 |      60.00 |\n| b       |        0 |     - |          - |"
        in caplog.text
    )


def test_metadata_is_set_once_and_a_conflict_changes_nothing():
    metadata = Metadata("set_once").set(classes=["a", "b"], ignore=255)
    metadata.classes = ["a", "b"]  # equal: allowed
    with pytest.raises(
        ValueError, match=r"'classes' of 'set_once' is \['a', 'b'\] and cannot become \['c'\]"
    ):
        metadata.classes = ["c"]
    assert metadata.as_dict() == {"name": "set_once", "classes": ["a", "b"], "ignore": 255}
    assert metadata.get("ignore") == 255
    assert metadata.get("colors", default=()) == ()
