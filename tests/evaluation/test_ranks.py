import torch
from torch import distributed as dist
from torch import multiprocessing, nn

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


def run_rank(rank, init_file, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=2)
    try:
        out["unequal parts", rank] = evaluate(PARTS[rank])
        out["nothing on rank 1", rank] = evaluate(PARTS[0] if rank == 0 else [])
        try:
            evaluate([])
        except ValueError as error:
            out["nothing at all", rank] = str(error)
        observer = Observer(rank)
        try:
            with observe_inference(observer, "val"):
                evaluate([batch(1)] * 3)
        except EvaluationAbandoned:
            out["abandoned by rank 1", rank] = observer.num_batches
        out["afterwards", rank] = evaluate(PARTS[rank])
    finally:
        dist.destroy_process_group()


def test_ranks_together_give_the_results_of_one_process_on_rank_0(tmp_path):
    with multiprocessing.Manager() as manager:
        out = manager.dict()
        multiprocessing.spawn(run_rank, (str(tmp_path / "rendezvous"), out), nprocs=2)
        results = dict(out)

    alone = evaluate(PARTS[0] + PARTS[1])
    assert (alone["classification"]["top1"], alone["loss"]["total_loss"]) == (40.0, 0.6)
    assert [results["unequal parts", rank] for rank in range(2)] == [alone, {}]
    assert [results["nothing on rank 1", rank] for rank in range(2)] == [evaluate(PARTS[0]), {}]
    assert [results["abandoned by rank 1", rank] for rank in range(2)] == [3, 1]
    assert [results["afterwards", rank] for rank in range(2)] == [alone, {}]
    for rank in range(2):  # no rank is left waiting for one that failed
        assert results["nothing at all", rank] == "the loader list gave no batch; there is nothing to evaluate"
