"""The wrapper for torchmetrics, against the evaluators of trainkit."""

import importlib

import pytest
import torch
from trainkit.projects.evaluators.torch_metrics import TorchMetrics

from tests.projects.torchvision_here import need
from tests.two_ranks import on_two_ranks
from trainkit.evaluation import inference_on_dataset

SCORES = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 3


def results(part=slice(None)):
    """On batches of three samples; the model gives back the scores that are in a batch."""
    need("torchmetrics")
    classification = importlib.import_module("torchmetrics.classification")
    evaluator = TorchMetrics(
        {
            "top1": classification.MulticlassAccuracy(3, average="micro"),
            "f1": classification.MulticlassF1Score(3),
        },
        task="labels",
    )
    batches = zip(SCORES[part].split(3), LABELS[part].split(3), strict=True)
    loader = [{"scores": scores, "label": labels} for scores, labels in batches]
    return inference_on_dataset(lambda batch: batch["scores"], loader, evaluator)


def test_the_results_are_those_of_the_package_and_of_the_last_evaluation_alone():
    expected = (SCORES.argmax(1) == LABELS).float().mean().item()
    assert results()["labels"]["top1"] == pytest.approx(expected)
    assert results() == results()
    assert results(slice(3)) != results()


class Accuracy:
    """What `TorchMetrics` asks of a metric."""

    def to(self, device):
        return self

    def reset(self):
        self.right = []

    def update(self, outputs, labels):
        self.right += (outputs.argmax(1) == labels).tolist()

    def compute(self):
        return sum(self.right) / len(self.right)


@pytest.mark.parametrize(
    "make_batch",
    [
        lambda scores, labels: {"scores": scores, "label": labels},
        lambda scores, labels: {"scores": scores, "labels": labels},  # of Hugging Face
        lambda scores, labels: [scores, labels],
    ],
)
def test_labels_are_found_where_other_evaluators_find_them(make_batch):
    loader = [make_batch(SCORES[i : i + 3], LABELS[i : i + 3]) for i in range(0, 12, 3)]
    evaluator = TorchMetrics({"accuracy": Accuracy()})

    def model(batch):
        return batch["scores"] if isinstance(batch, dict) else batch[0]

    found = inference_on_dataset(model, loader, evaluator)["metrics"]["accuracy"]
    assert found == pytest.approx((SCORES.argmax(1) == LABELS).double().mean().item())


def test_a_batch_without_labels_is_an_error_that_names_its_entries():
    loader = [{"scores": SCORES, "target": LABELS}]
    with pytest.raises(KeyError, match="no entry 'label' with the labels; it has scores, target"):
        inference_on_dataset(lambda batch: batch["scores"], loader, TorchMetrics({"a": Accuracy()}))


def _half(rank, folder):
    return results(slice(rank * 6, rank * 6 + 6))


@pytest.mark.slow
def test_ranks_count_together_and_rank_0_has_the_results(tmp_path):
    need("torchmetrics")  # before the ranks start: in a rank it would be an error
    [[of_rank_0, of_rank_1]] = on_two_ranks([_half], tmp_path).values()
    assert of_rank_0["labels"] == pytest.approx(results()["labels"])
    assert of_rank_1 == {}
