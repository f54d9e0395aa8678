import torch
from torch import nn

from tests.two_ranks import on_two_ranks
from trainkit.evaluation import ClassificationEvaluator, LossEvaluator, inference_on_dataset, observe_inference
from trainkit.evaluation.observer import EvaluationAbandoned, InferenceObserver


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return self.weight * batch["scores"]

    def losses(self, batch):
        return {"loss_a": self.weight * batch["label"].float().mean()}


def batch(*labels):
    """The first sample of each batch is right, the others are wrong."""
    predicted = [labels[0], *(1 - label for label in labels[1:])]
    return {"scores": torch.eye(2)[predicted], "label": torch.tensor(labels)}


PARTS = [[batch(1, 0, 1, 1)], [batch(0)]]  # rank -> batches


def evaluate(batches):
    model = Model()
    return inference_on_dataset(model, batches, [ClassificationEvaluator(), LossEvaluator(model)])


class Observer(InferenceObserver):
    """Stops before the second batch, on rank 1 only."""

    def __init__(self, rank):
        self.rank, self.num_batches = rank, 0

    def is_stopping(self):
        return self.rank == 1 and self.num_batches == 1

    def after_eval_step(self, phase, index, inputs, outputs):
        self.num_batches += 1


def results(rank, folder):
    found = {"unequal parts": evaluate(PARTS[rank]), "nothing on rank 1": evaluate(PARTS[0] if rank == 0 else [])}
    try:
        evaluate([])
    except ValueError as error:
        found["nothing at all"] = str(error)
    observer = Observer(rank)
    try:
        with observe_inference(observer, "val"):
            evaluate([batch(1)] * 3)
    except EvaluationAbandoned:
        found["abandoned by rank 1"] = observer.num_batches
    return {**found, "afterwards": evaluate(PARTS[rank])}


def test_ranks_together_give_the_results_of_one_process_on_rank_0(tmp_path):
    ranks = on_two_ranks([results], tmp_path)["results"]

    alone = evaluate(PARTS[0] + PARTS[1])
    assert (alone["classification"]["top1"], alone["loss"]["total_loss"]) == (40.0, 0.6)
    assert [found["unequal parts"] for found in ranks] == [alone, {}]
    assert [found["nothing on rank 1"] for found in ranks] == [evaluate(PARTS[0]), {}]
    assert [found["abandoned by rank 1"] for found in ranks] == [3, 1]
    assert [found["afterwards"] for found in ranks] == [alone, {}]
    for found in ranks:  # no rank is left waiting for one that failed
        assert found["nothing at all"] == "the loader list gave no batch; there is nothing to evaluate"
