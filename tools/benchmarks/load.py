"""A load of 300 MB, beside torch.load and `load_state_dict` of model and optimizer.

trainkit verifies every byte of the file by its CRC. The file is in the memory of the system.
"""

from pathlib import Path

import torch
from fvcore.common.checkpoint import Checkpointer as FvcoreCheckpointer
from torch import nn

from benchmarks import job
from benchmarks.measure import Comparison, compare, one_thread, timed
from benchmarks.save import Stack
from trainkit.checkpoint import Checkpointer

ROUNDS = 15


def measure(rounds: int, scratch: Path, quick: bool) -> list[Comparison]:
    layers = 1 if quick else 24
    with one_thread(), job.logging_to(scratch):
        model = Stack(layers, 1024)
        optimizer = torch.optim.AdamW(model.parameters(), lr=job.LR)
        model(job.make_batches(1)[0]).backward()
        optimizer.step()
        ours = Checkpointer(model, scratch, optimizer=optimizer)
        fvcore = FvcoreCheckpointer(model, str(scratch), optimizer=optimizer)
        ours.save("model")
        path = scratch / "model.pth"
        others = {
            "torch.load alone": timed(lambda: torch.load(path, weights_only=True)),
            "trainkit": timed(lambda: ours.load(path)),
            "fvcore's Checkpointer": timed(lambda: fvcore.load(str(path))),
        }
        run_by_hand = timed(lambda: load_by_hand(path, model, optimizer))
        return [compare("load, 300 MB", load_by_hand, run_by_hand, others, rounds)]


def load_by_hand(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
