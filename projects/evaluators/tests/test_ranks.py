import torch
from torch import nn

from tests.two_ranks import on_two_ranks
from trainkit.evaluation import ClassificationEvaluator, LossEvaluator, inference_on_dataset


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
    return inference_on_dataset(Model(), batches, [ClassificationEvaluator(), LossEvaluator()])


def results(rank, folder):
    return evaluate(PARTS[rank]), evaluate(PARTS[0] if rank == 0 else [])


def test_ranks_together_give_the_results_of_one_process_on_rank_0(tmp_path):
    alone = evaluate(PARTS[0] + PARTS[1])
    assert (alone["classification"]["top1"], alone["loss"]["total_loss"]) == (40.0, 0.6)
    assert on_two_ranks([results], tmp_path)["results"] == [(alone, evaluate(PARTS[0])), ({}, {})]
