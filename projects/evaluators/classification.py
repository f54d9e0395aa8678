"""Top-k and mean class accuracy."""

from collections.abc import Sequence
from typing import Any

from trainkit.projects.evaluators.counting import CountingEvaluator, check_largest_k, sum_over_ranks

from trainkit.config.config import CfgNode
from trainkit.config.from_config import configurable
from trainkit.evaluation.build import EVALUATOR_REGISTRY
from trainkit.utils import comm


@EVALUATOR_REGISTRY.register()
class ClassificationEvaluator(CountingEvaluator):
    """Accuracy of one label per sample, in percent.

    A batch is a mapping with labels ``[N]`` under ``label_key``, or a list of N samples with one label each. The
    model's output is scores ``[N, C]``, alone or under ``"logits"`` or ``"scores"``. The counts stay on the device of
    the scores, and ``process`` does not wait for this device. So labels out of range are reported at the end.

    The results are ``top<k>`` and ``mean_class_accuracy``, the mean over the classes with samples.

    Args:
        topk: each k gives a metric ``top<k>``: the label is among the k highest scores.
        task: the key of the results.
    """

    @configurable
    def __init__(self, topk: Sequence[int] = (1,), *, label_key: str = "label", task: str = "classification") -> None:
        self._topk = check_topk(topk)
        super().__init__("NC", label_key, task)

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        return {}

    def count_shapes(self, num_classes: int) -> Sequence[tuple[int, ...]]:
        """[C] samples of each class; [C] those with the highest score; [largest k] how often the label has the j-th
        highest score; [] labels out of range."""
        check_largest_k(self._topk[-1], num_classes)
        return (num_classes,), (num_classes,), (self._topk[-1],), ()

    def process(self, inputs: Any, outputs: Any) -> None:
        """Count one batch; raises as `compare`."""
        scores, labels, num_classes = self.compare(inputs, outputs)
        samples, right, hits_at, num_bad_labels = self._counts
        valid = (labels >= 0) & (labels < num_classes)
        entries = labels.where(valid, 0)
        hits = scores.topk(len(hits_at), dim=1).indices == labels[:, None]
        samples.index_add_(0, entries, valid.long())
        right.index_add_(0, entries, hits[:, 0].long())
        hits_at += hits.sum(dim=0)
        num_bad_labels += (~valid).sum()

    def evaluate(self) -> dict[str, Any]:
        """Add the counts of all ranks, and compute the metrics.

        Returns:
            On rank 0 ``{task: metrics}``, on other ranks ``{}``.

        Raises:
            ValueError: nothing was counted, or a label was out of range; on every rank.
        """
        samples, right, hits_at = sum_over_ranks(self._counts)
        if not comm.is_main_process():
            return {}
        present = (100.0 * right.double() / samples)[samples > 0].tolist()  # exact up to 2**53 samples
        metrics = {f"top{k}": 100.0 * int(hits_at[:k].sum()) / int(samples.sum()) for k in self._topk}
        return {self._task: {**metrics, "mean_class_accuracy": sum(present) / len(present)}}


def check_topk(topk: Sequence[int]) -> list[int]:
    """The numbers in order. Raises ValueError if there is none, or one of them is no positive integer."""
    if not topk or any(type(k) is not int or k < 1 for k in topk):
        raise ValueError(f"topk must hold one or more integers >= 1, got {topk!r}")
    return sorted(set(topk))
