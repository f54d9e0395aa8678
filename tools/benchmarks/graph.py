"""How much faster a step is as a recorded CUDA graph if the GPU waits for the CPU."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import job
from benchmarks.measure import Row, alternate, compare
from trainkit.engine import GraphTrainer, SimpleTrainer
from trainkit.utils.device import move_to_device

_WIDTH = 64

GRAPH = Row(
    "GraphTrainer on a launch-bound model on CUDA over the bare loop",
    None,
    3,
    at_least=True,
    note="no GPU",
)
EAGER = Row("SimpleTrainer on the same model over the bare loop", None, note="no GPU")


class LaunchBound(nn.Module):
    """30 small layers with norms, two losses: about 500 kernels per step, and each takes less time than its launch."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU())
            for _ in range(30)
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        outputs = self.layers(batch)
        return {"loss_mse": outputs.square().mean(), "loss_l1": (outputs - 1).abs().mean()}


def graph(rounds: int = 15, *, scratch: Path, steps: int = 200, device: str = "cuda") -> list[Row]:
    """The speed of both trainers with the hooks of the step rows; rows without a value if there is no GPU.

    All of them copy pinned batches to the device and have the same fused optimizer.
    """
    if device == "cuda" and not torch.cuda.is_available():
        return [GRAPH, EAGER]

    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = LaunchBound().to(device)
        return model, torch.optim.AdamW(model.parameters(), job.LR / 10, fused=True)

    def trained(trainer_type: type[SimpleTrainer], name: str) -> job.Chunks:
        model, optimizer = make()
        trainer = trainer_type(model, batches, optimizer, async_write_metrics=True)
        job.register_hooks(trainer, scratch / name)
        return job.Chunks(trainer, finish)

    batches = [torch.randn(16, _WIDTH, pin_memory=device == "cuda") for _ in range(4)]
    to_device = partial(move_to_device, device=torch.device(device))
    runners: dict[str, Callable[[int], float]] = {
        "bare loop": job.BareLoop(*make(), map(to_device, itertools.cycle(batches)), finish),
        "SimpleTrainer": trained(SimpleTrainer, "eager"),
        "GraphTrainer": trained(GraphTrainer, "graph"),
    }
    with job.logging_to(scratch):
        found = alternate({name: partial(run, steps) for name, run in runners.items()}, rounds)
    return [
        compare(GRAPH.name, found, "GraphTrainer", "bare loop", GRAPH.goal, at_least=True),
        compare(EAGER.name, found, "SimpleTrainer", "bare loop", at_least=True),
    ]
