"""One, two and four processes with the same global batches are the same run, however the model is spread over them.

test_ddp.py compares two ranks of DDP with one process, to the last bit.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.engine.tiny import scalars, sgd
from tests.two_ranks import on_two_ranks
from trainkit.engine.fsdp import shard_model
from trainkit.engine.parallel import create_ddp_model
from trainkit.engine.step import SimpleTrainer
from trainkit.utils import comm

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


def in_shards(model):
    shard_model(model, model.layers)
    return model


def in_shards_from_the_meta_device(model):
    """Only rank 0 has weights."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    model = model.to("meta")
    shard_model(model, model.layers, weights=weights if comm.is_main_process() else {})
    return model


# name -> model -> model
WAYS = {"ddp": create_ddp_model, "fsdp": in_shards, "fsdp, meta": in_shards_from_the_meta_device}


def runs(rank, folder):
    """By way and micro-batches: what `train` gives."""
    runs = [("fsdp", 1), ("fsdp", 2), ("fsdp, meta", 1), ("ddp", 1), ("ddp", 2)]
    return {(way, steps): train(WAYS[way], rank, dist.get_world_size(), steps) for way, steps in runs}


def without_exchange(rank, folder):
    return train(without_averaged_gradients, rank, 2)


@pytest.fixture(scope="module")
def alone():
    losses, weights = train(lambda model: model)
    assert len(losses) == NUM_ITER
    assert max(losses[-5:]) < losses[0] / 2
    return losses, weights


def test_losses_and_weights_of_four_ranks_are_those_of_one_process(alone, tmp_path):
    for by_way in on_two_ranks([runs], tmp_path, num_ranks=4)["runs"]:
        for way, (losses, weights) in by_way.items():
            assert (way, losses) == (way, pytest.approx(alone[0], abs=1e-5, rel=0))
            torch.testing.assert_close(weights, alone[1], atol=1e-5, rtol=0)


def test_ranks_that_do_not_average_their_gradients_differ(alone, tmp_path):
    for losses, weights in on_two_ranks([without_exchange], tmp_path)["without_exchange"]:
        assert losses[0] == pytest.approx(alone[0][0], abs=1e-5)
        assert losses[-1] != pytest.approx(alone[0][-1], abs=1e-3)
        assert not torch.allclose(weights["head.weight"], alone[1]["head.weight"], atol=1e-3)
