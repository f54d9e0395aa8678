"""Small stand-ins shared by the checkpoint tests."""

from pathlib import Path

import pytest
import torch
from torch import nn

from trainkit.checkpoint import Checkpointer


class Counter:
    """A checkpointable with one value."""

    def __init__(self, value: object = 0) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


def linear(fill: float, num_features: int = 2) -> nn.Linear:
    model = nn.Linear(num_features, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model


def weight_of(model: nn.Linear) -> float:
    assert model.weight.unique().numel() == 1
    return model.weight[0, 0].item()


def resumed(folder: Path) -> object:
    """The iteration from which a run goes on: that of its trainer and of its weights."""
    model, trainer = linear(0), Counter()
    Checkpointer(model, folder, trainer=trainer).resume_or_load("", resume=True)
    assert trainer.value == weight_of(model)
    return trainer.value


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A folder with checkpoints of iterations 9, 19 and 29, whose weights are all 9, 19 and 29."""
    for iteration in (9, 19, 29):
        checkpointer = Checkpointer(linear(iteration), tmp_path, trainer=Counter(iteration))
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
    return tmp_path
