"""One, two and four processes with the same global batches are the same run.

test_ddp.py compares two ranks of DDP with one process, to the last bit.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.engine.tiny import scalars, sgd
from tests.two_ranks import on_two_ranks
from trainkit.engine.parallel import create_ddp_model
from trainkit.engine.step import SimpleTrainer

pytestmark = pytest.mark.slow

NUM_ITER = 30


class Net(nn.Module):
    """Without batch norm and dropout; a batch is ``(x [N, 6], y [N, 1])``."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, batch):
        x, y = batch
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"loss": (self.head(x) - y).square().mean()}


def part(rank, num_ranks, steps):
    """What a rank gets of `NUM_ITER` batches of 24 samples, each in ``steps`` micro-batches."""
    generator = torch.Generator().manual_seed(7)
    xs = torch.randn(NUM_ITER, 24, 6, generator=generator)
    ys = xs.square().mean(2, keepdim=True) + xs.mean(2, keepdim=True)
    of_all = [micro for x, y in zip(xs, ys, strict=True) for micro in zip(x.chunk(steps), y.chunk(steps), strict=True)]
    return [(x.chunk(num_ranks)[rank], y.chunk(num_ranks)[rank]) for x, y in of_all]


def train(parallelize, rank=0, num_ranks=1, steps=1):
    """The losses and the final weights; ranks start with different ones, which ``parallelize`` has to make equal."""
    model = parallelize(Net(seed=rank))
    trainer = SimpleTrainer(
        model, part(rank, num_ranks, steps), sgd(model, 0.05, momentum=0.9), accumulation_steps=steps
    )
    trainer.train(0, NUM_ITER)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [loss for loss, _ in scalars(trainer)["total_loss"]], weights


def without_averaged_gradients(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    return model


def runs(rank, folder):
    """By the number of micro-batches: what `train` gives."""
    return {steps: train(create_ddp_model, rank, dist.get_world_size(), steps) for steps in (1, 2)}


def without_exchange(rank, folder):
    return train(without_averaged_gradients, rank, 2)


@pytest.fixture(scope="module")
def alone():
    losses, weights = train(lambda model: model)
    assert len(losses) == NUM_ITER
    assert max(losses[-5:]) < losses[0] / 2
    return losses, weights


def test_losses_and_weights_of_four_ranks_are_those_of_one_process(alone, tmp_path):
    for by_steps in on_two_ranks([runs], tmp_path, num_ranks=4)["runs"]:
        for losses, weights in by_steps.values():
            assert losses == pytest.approx(alone[0], abs=1e-5, rel=0)
            torch.testing.assert_close(weights, alone[1], atol=1e-5, rtol=0)


def test_ranks_that_do_not_average_their_gradients_differ(alone, tmp_path):
    for losses, weights in on_two_ranks([without_exchange], tmp_path)["without_exchange"]:
        assert losses[0] == pytest.approx(alone[0][0], abs=1e-5)
        assert losses[-1] != pytest.approx(alone[0][-1], abs=1e-3)
        assert not torch.allclose(weights["head.weight"], alone[1]["head.weight"], atol=1e-3)
