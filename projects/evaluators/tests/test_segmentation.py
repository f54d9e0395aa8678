import logging
import math

import pytest
import torch

from trainkit.config import get_cfg
from trainkit.data import MetadataCatalog
from trainkit.evaluation import SemSegEvaluator, build_evaluator

# One picture of 2 x 5 pixels. Of class 0 two pixels of three are found, of class 1 three of five, of class 2 none of
# two; class 3 is predicted once, and class 4 is nowhere.
LABELS = torch.tensor([[[0, 0, 0, 1, 1], [1, 1, 1, 2, 2]]])
PREDICTED = torch.tensor([[[0, 0, 1, 1, 1], [1, 0, 3, 0, 1]]])
IOU = [100 * 2 / 5, 100 * 3 / 7, 0.0, 0.0, math.nan]  # right / (labelled + predicted - right)
RESULTS = {
    "mIoU": sum(IOU[:4]) / 4,
    "aAcc": 50.0,
    "mAcc": (100 * 2 / 3 + 100 * 3 / 5 + 0.0) / 3,  # of the three classes that are labelled
    **{f"IoU-{label}": iou for label, iou in enumerate(IOU)},
}


def scores_for(predicted, num_classes=5):
    return torch.nn.functional.one_hot(predicted, num_classes).permute(0, 3, 1, 2).float()


SCORES = scores_for(PREDICTED)


def evaluate(*batches, **kwargs):
    evaluator = SemSegEvaluator(**kwargs)
    for inputs, outputs in batches:
        evaluator.process(inputs, outputs)
    return evaluator.evaluate()


def approx(results):
    return {name: pytest.approx(value, rel=1e-14, nan_ok=True) for name, value in results.items()}


# ---------------------------------------------------------------------- the numbers


def test_the_results_are_those_of_the_confusion_matrix_in_percent():
    assert evaluate(({"label": LABELS}, SCORES)) == {"sem_seg": approx(RESULTS)}


@pytest.mark.parametrize("ignore_label", [255, -1, 7, 3])
def test_pixels_with_the_ignore_label_do_not_count(ignore_label):
    labels = LABELS.clone()
    labels[0, 1, 1:] = ignore_label  # four pixels, of which none is right
    iou = [100 * 2 / 3, 100 * 3 / 4, math.nan, math.nan, math.nan]
    assert evaluate(({"label": labels}, SCORES), ignore_label=ignore_label)["sem_seg"] == approx(
        {"mIoU": sum(iou[:2]) / 2, "aAcc": 100 * 5 / 6, "mAcc": (100 * 2 / 3 + 100) / 2}
        | {f"IoU-{label}": value for label, value in enumerate(iou)}
    )


def test_batches_of_unequal_number_and_size_count_by_their_pixels():
    left, right, twice = LABELS[..., :1], LABELS[..., 1:], torch.cat([LABELS, LABELS])
    split = [({"label": left}, SCORES[..., :1]), ({"label": right}, SCORES[..., 1:])]
    assert evaluate(*split)["sem_seg"] == approx(RESULTS)
    assert evaluate(*split, ({"label": twice}, torch.cat([SCORES, SCORES])))["sem_seg"] == approx(RESULTS)
    assert evaluate(split[1])["sem_seg"] != approx(RESULTS)


# ---------------------------------------------------------------------- the forms of a batch


def test_the_metadata_of_a_data_set_name_the_classes_and_what_is_ignored(caplog):
    MetadataCatalog.get("evaluated_canvases").set(class_names=["paper", "a", "b", "c", "d"], ignore_label=2)
    cfg = get_cfg()
    cfg.TEST.EVALUATORS = ["SemSegEvaluator"]
    evaluator = build_evaluator(cfg, "evaluated_canvases")
    evaluator.process({"label": LABELS}, SCORES)
    with caplog.at_level(logging.INFO, logger="trainkit.projects"):
        results = evaluator.evaluate()["sem_seg"]
    assert [*results] == ["mIoU", "aAcc", "mAcc", "IoU-paper", "IoU-a", "IoU-b", "IoU-c", "IoU-d"]
    assert results["aAcc"] == 100 * 5 / 8
    assert caplog.messages == [
        "Each class in percent (sem_seg):\n"
        "| class   |   pixels |   IoU |   accuracy |\n"
        "|:--------|---------:|------:|-----------:|\n"
        "| paper   |        3 | 50.00 |      66.67 |\n"
        "| a       |        5 | 50.00 |      60.00 |\n"
        "| b       |        0 |     - |          - |\n"
        "| c       |        0 |  0.00 |          - |\n"
        "| d       |        0 |     - |          - |"
    ]


# ---------------------------------------------------------------------- errors


# ---------------------------------------------------------------------- two ranks
