import logging
import math

import pytest
import torch
from trainkit.projects.evaluators.tests.host_reads import HostReads

from tests.two_ranks import on_two_ranks
from trainkit.config import get_cfg
from trainkit.data import MetadataCatalog
from trainkit.evaluation import SemSegEvaluator, build_evaluator, inference_on_dataset

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


def test_a_class_that_is_nowhere_is_no_part_of_a_mean_and_one_that_is_only_predicted_lowers_the_miou():
    four = evaluate(({"label": LABELS}, SCORES[:, :4]))["sem_seg"]
    assert four == approx({name: value for name, value in RESULTS.items() if name != "IoU-4"})
    not_predicted = torch.where(PREDICTED == 3, 1, PREDICTED)
    assert math.isnan(evaluate(({"label": LABELS}, scores_for(not_predicted)))["sem_seg"]["IoU-3"])


def test_everything_right_is_100_percent():
    results = evaluate(({"label": LABELS}, scores_for(LABELS)))["sem_seg"]
    assert [results[name] for name in ("mIoU", "aAcc", "mAcc", "IoU-0", "IoU-2")] == [100.0] * 5


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


@pytest.mark.parametrize("key", ["logits", "scores"])
def test_scores_may_lie_in_a_dict(key):
    assert evaluate(({"label": LABELS}, {key: SCORES}))["sem_seg"] == approx(RESULTS)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_may_be_of_any_integer_type_and_in_a_list_of_samples(dtype):
    samples = [{"mask": labels.to(dtype)} for labels in torch.cat([LABELS, LABELS])]
    results = evaluate((samples, torch.cat([SCORES, SCORES])), label_key="mask", task="coarse")
    assert results == {"coarse": approx(RESULTS)}


def test_reset_forgets_the_pixels_and_the_number_of_classes():
    evaluator = SemSegEvaluator()
    evaluator.process({"label": LABELS}, SCORES)
    evaluator.reset()
    evaluator.process({"label": torch.zeros(1, 2, 2, dtype=torch.int64)}, torch.zeros(1, 2, 2, 2))
    assert evaluator.evaluate()["sem_seg"]["mIoU"] == 100.0


def test_it_evaluates_a_model_over_a_loader_whose_last_batch_is_smaller():
    samples = [{"index": i, "label": labels} for i, labels in enumerate(torch.cat([LABELS] * 3))]
    loader = torch.utils.data.DataLoader(samples, batch_size=2)
    results = inference_on_dataset(lambda batch: SCORES.repeat(len(batch["index"]), 1, 1, 1), loader, SemSegEvaluator())
    assert results["sem_seg"] == approx(RESULTS)


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


def test_counting_a_batch_does_not_wait_for_the_device():
    evaluator = SemSegEvaluator()
    with HostReads() as reads:
        evaluator.process({"label": LABELS}, SCORES)
        evaluator.process({"label": LABELS}, SCORES)
    assert reads.count == 0
    with reads:
        evaluator.evaluate()
    assert reads.count > 0


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"ignore_label": None}, TypeError, "ignore_label must be an integer, got None"),
        ({"ignore_label": 255.0}, TypeError, "ignore_label must be an integer, got 255.0"),
        ({"ignore_label": True}, TypeError, "ignore_label must be an integer, got True"),
        ({"class_names": ["a", "b", "a"]}, ValueError, r"class_names must differ.*\['a', 'b', 'a'\]"),
    ],
)
def test_wrong_arguments_are_refused_by_the_constructor(arguments, error, said):
    with pytest.raises(error, match=said):
        SemSegEvaluator(**arguments)


@pytest.mark.parametrize(
    ("inputs", "outputs", "error", "said"),
    [
        ({"image": LABELS}, SCORES, KeyError, "no labels under 'label'.*image"),
        (LABELS, SCORES, TypeError, "batch must be a mapping with the key 'label'.*got tensor"),
        (
            {"label": LABELS[..., :4]},
            SCORES,
            ValueError,
            r"shape \[1, 2, 5\].*\[1, 2, 4\]",
        ),
        ({"label": LABELS[:, None]}, SCORES, ValueError, r"integers of shape \[1, 2, 5\].*got .*\[1, 1, 2, 5\]"),
        ({"label": LABELS.float()}, SCORES, ValueError, "labels must be integers.*torch.float32"),
        ({"label": LABELS}, PREDICTED, ValueError, r"scores must have the shape \[N, C, H, W\], got \[1, 2, 5\]"),
        ({"label": LABELS}, {"boxes": SCORES}, KeyError, "'logits' or 'scores'.*boxes"),
        ({"label": LABELS}, [SCORES], TypeError, r"scores \[N, C, H, W\] in eval mode, got list"),
    ],
)
def test_a_batch_of_the_wrong_form_is_an_error_that_says_what_is_accepted(inputs, outputs, error, said):
    with pytest.raises(error, match=said):
        SemSegEvaluator().process(inputs, outputs)


def test_class_names_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match=r"2 names.*5 classes"):
        SemSegEvaluator(class_names=["a", "b"]).process({"label": LABELS}, SCORES)


def test_a_changed_number_of_classes_is_an_error():
    evaluator = SemSegEvaluator()
    evaluator.process({"label": LABELS}, SCORES)
    with pytest.raises(ValueError, match="4 classes, those of the batches before had 5"):
        evaluator.process({"label": LABELS}, SCORES[:, :4])


@pytest.mark.parametrize("label", [-1, 5, 254])
def test_labels_that_are_no_class_are_an_error_at_the_end(label):
    labels = LABELS.clone()
    labels[0, 0, :2] = label
    with pytest.raises(ValueError, match=r"2 labels are outside \[0, 5\)"):
        evaluate(({"label": labels}, SCORES))


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(ValueError, match="no batch was processed"):
        SemSegEvaluator().evaluate()
    with pytest.raises(ValueError, match="every pixel has the ignore_label 255"):
        evaluate(({"label": torch.full_like(LABELS, 255)}, SCORES))


# ---------------------------------------------------------------------- two ranks


def evaluated_in_unequal_parts(rank, folder):
    parts = [
        [(LABELS[..., :1], SCORES[..., :1]), (LABELS[..., 1:3], SCORES[..., 1:3])],
        [(LABELS[..., 3:], SCORES[..., 3:])],
    ]
    return evaluate(*[({"label": labels}, scores) for labels, scores in parts[rank]])


def evaluated_by_rank_1_alone(rank, folder):
    return evaluate(*[({"label": LABELS}, SCORES)] * rank)


def labelled_wrongly_on_rank_1(rank, folder):
    return evaluate(({"label": LABELS + 10 * rank}, SCORES))


def given_nothing(rank, folder):
    return evaluate()


@pytest.mark.slow
def test_two_ranks_together_give_the_results_of_one_process_on_rank_0(tmp_path):
    checks = [evaluated_in_unequal_parts, evaluated_by_rank_1_alone, labelled_wrongly_on_rank_1, given_nothing]
    found = on_two_ranks(checks, tmp_path)

    assert found["evaluated_in_unequal_parts"] == [{"sem_seg": approx(RESULTS)}, {}]
    assert found["evaluated_by_rank_1_alone"] == [{"sem_seg": approx(RESULTS)}, {}]
    for name, said in [("labelled_wrongly_on_rank_1", "10 labels are outside"), ("given_nothing", "no batch")]:
        assert all(message.startswith(f"ValueError: {said}") for message in found[name])  # no rank waits for another
