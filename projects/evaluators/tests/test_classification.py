import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.evaluation import ClassificationEvaluator


class HostReads(TorchDispatchMode):
    """Counts the operations whose result or size the host has to wait for."""

    WAITING = frozenset(("_local_scalar_dense", "nonzero", "bincount", "masked_select"))

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in self.WAITING
        return func(*args, **(kwargs or {}))


# The ranking of the three classes by each sample, best first, and its label.
RANKED = [([0, 1, 2], 0), ([1, 0, 2], 0), ([2, 1, 0], 0), ([1, 2, 0], 1), ([0, 2, 1], 1)]
SCORES = torch.tensor([[2.0 - ranking.index(label) for label in range(3)] for ranking, _ in RANKED])
LABELS = torch.tensor([label for _, label in RANKED])


def evaluate(*batches, **kwargs):
    evaluator = ClassificationEvaluator(**kwargs)
    for inputs, outputs in batches:
        evaluator.process(inputs, outputs)
    return evaluator.evaluate()


def test_accuracies_are_exact_and_in_percent():
    assert evaluate(({"label": LABELS}, SCORES), topk=(1, 2, 3)) == {
        "classification": {
            "top1": 40.0,  # samples 0 and 3 of 5
            "top2": 60.0,  # and sample 1
            "top3": 100.0,
            "mean_class_accuracy": (100 / 3 + 50) / 2,  # class 2 has no samples
        }
    }


@pytest.mark.parametrize("as_label", [int, torch.tensor])
def test_a_batch_may_be_a_list_of_samples(as_label):
    samples = [{"target": as_label(label)} for label in LABELS.tolist()]
    assert evaluate((samples, SCORES), label_key="target") == evaluate(({"label": LABELS}, SCORES))


def test_the_key_of_hugging_face_is_read_if_there_is_no_other():
    assert evaluate(({"labels": LABELS}, SCORES)) == evaluate(({"label": LABELS}, SCORES))
    assert evaluate(([{"labels": label} for label in LABELS], SCORES)) == evaluate(({"label": LABELS}, SCORES))
    assert evaluate(({"label": LABELS, "labels": LABELS * 0}, SCORES)) == evaluate(({"label": LABELS}, SCORES))
    assert evaluate(({"label": LABELS}, {"logits": SCORES})) == evaluate(({"label": LABELS}, SCORES))


def test_counting_a_batch_does_not_wait_for_the_device():
    evaluator = ClassificationEvaluator(topk=(1, 2))
    with HostReads() as reads:
        evaluator.process({"label": LABELS}, SCORES)
        evaluator.process({"label": LABELS}, SCORES)
    assert reads.count == 0
    with reads:
        evaluator.evaluate()
    assert reads.count > 0


@pytest.mark.parametrize(
    ("inputs", "outputs", "error", "said"),
    [
        ({"image": LABELS}, SCORES, KeyError, "'label'"),
        (LABELS, SCORES, TypeError, "batch must be a mapping with the key 'label'.*got tensor"),
        ({"label": LABELS[:2]}, SCORES, ValueError, r"shape \[5\].*\[2\]"),
        ({"label": LABELS.float()}, SCORES, ValueError, "labels must be integers.*torch.float32"),
        ({"label": LABELS}, SCORES[:, 0], ValueError, r"scores must have the shape \[N, C\], got \[5\]"),
        ({"label": LABELS}, {"boxes": SCORES}, TypeError, "'logits' or 'scores'.*boxes"),
    ],
)
def test_a_batch_of_the_wrong_form_is_an_error_that_says_what_is_accepted(inputs, outputs, error, said):
    with pytest.raises(error, match=said):
        ClassificationEvaluator().process(inputs, outputs)


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_outside_the_classes_are_an_error_at_the_end(label):
    with pytest.raises(ValueError, match=r"1 labels are not below 3 classes"):
        evaluate(({"label": torch.tensor([0, label])}, SCORES[:2]))


def test_nothing_processed_is_an_error():
    with pytest.raises(ValueError, match=r"no batch was processed"):
        ClassificationEvaluator().evaluate()
