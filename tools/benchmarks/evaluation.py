"""LossEvaluator, beside the same two passes by hand.

Each batch is predicted in eval mode, and its losses are computed with dropout and batch norm frozen.
The model has 8 layers with batch norm and dropout; batches have 32 samples. The memory is what the
process has more after 20,000 batches of a tiny model.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from trainkit.projects.evaluators.loss import LossEvaluator

from benchmarks import job
from benchmarks.measure import (
    Comparison,
    by_hand,
    compare,
    in_new_process,
    one_thread,
    resident_mib,
)
from trainkit.evaluation import inference_on_dataset

ROUNDS = 21


class Classifier(nn.Module):
    """Gives losses in train mode, and predictions in eval mode."""

    def __init__(self, blocks: int = 8, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(16, width)]
        for _ in range(blocks):
            layers.append(nn.Linear(width, width))
            layers.append(nn.BatchNorm1d(width))
            layers.append(nn.ReLU())
            layers.append(nn.Dropout(0.1))
        layers.append(nn.Linear(width, 16))
        self.layers = nn.Sequential(*layers)

    def forward(self, batch: job.Batch) -> Tensor | dict[str, Tensor]:
        inputs, targets = batch
        outputs: Tensor = self.layers(inputs)
        if not self.training:
            return outputs
        return {
            "loss_mse": nn.functional.mse_loss(outputs, targets),
            "loss_l1": nn.functional.l1_loss(outputs, targets),
        }


class LossesByHand:
    """The mean of each loss over all samples."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.switched = []
        for module in model.modules():
            if not isinstance(module, nn.BatchNorm1d | nn.Dropout):
                self.switched.append(module)
        self.sums: dict[str, float] = {}
        self.num_samples = 0

    def process(self, batch: job.Batch) -> None:
        for module in self.switched:
            module.training = True
        losses = self.model(batch)
        for module in self.switched:
            module.training = False
        inputs, _ = batch
        total = 0.0
        for name, loss in losses.items():
            value = loss.item()
            self.sums[name] = self.sums.get(name, 0.0) + value * len(inputs)
            total += value
        self.sums["total_loss"] = self.sums.get("total_loss", 0.0) + total * len(inputs)
        self.num_samples += len(inputs)

    def evaluate(self) -> dict[str, float]:
        return {name: value / self.num_samples for name, value in self.sums.items()}


@torch.no_grad()
def evaluate_by_hand(model: nn.Module, batches: list[job.Batch]) -> dict[str, float]:
    model.eval()
    losses = LossesByHand(model)
    for batch in batches:
        model(batch)
        losses.process(batch)
    model.train()
    return losses.evaluate()


def evaluate(model: nn.Module, batches: list[job.Batch]) -> Mapping[str, float]:
    results: Mapping[str, float] = inference_on_dataset(model, batches, LossEvaluator())["loss"]
    return results


def measure(rounds: int, scratch: Path, quick: bool) -> list[Comparison]:
    with one_thread(), job.logging_to(scratch):
        torch.manual_seed(0)
        model = Classifier()
        batches = job.make_batches(2 if quick else 200, size=32)

        def per_batch(run: Callable[[nn.Module, list[job.Batch]], object]) -> float:
            start = time.perf_counter()
            run(model, batches)
            return (time.perf_counter() - start) / len(batches)

        time_of_batch = compare(
            "two passes of a batch",
            evaluate_by_hand,
            lambda: per_batch(evaluate_by_hand),
            {"LossEvaluator": lambda: per_batch(evaluate)},
            rounds,
        )
    num_batches = 100 if quick else 20_000
    found = {
        by_hand(LossesByHand): [in_new_process(_growth_by_hand, num_batches)],
        "LossEvaluator": [in_new_process(_growth, num_batches)],
    }
    work = f"memory after {num_batches:,} batches"
    return [time_of_batch, Comparison(work, LossesByHand, found, "MiB")]


def _growth_by_hand(num_batches: int) -> float:
    model = Classifier(1).eval()
    losses = LossesByHand(model)
    return _growth_of(losses.process, num_batches)


def _growth(num_batches: int) -> float:
    model = Classifier(1).eval()
    evaluator = LossEvaluator()
    evaluator.bind(model)
    evaluator.reset()
    return _growth_of(lambda batch: evaluator.process(batch, None), num_batches)


@torch.no_grad()
def _growth_of(process: Callable[[job.Batch], None], num_batches: int) -> float:
    """By how many MiB the process grows, after the first 50 batches."""
    torch.set_num_threads(1)
    (batch,) = job.make_batches(1)
    for _ in range(50):
        process(batch)
    before = resident_mib()
    for _ in range(num_batches):
        process(batch)
    return resident_mib() - before
