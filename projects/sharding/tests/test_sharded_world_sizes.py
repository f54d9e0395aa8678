"""Four processes that share a model have the losses and weights of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from trainkit.projects.sharding.fsdp import shard_model

from tests.engine.test_ddp import Net, part
from tests.engine.tiny import scalars, sgd
from tests.two_ranks import on_two_ranks
from trainkit.engine import SimpleTrainer
from trainkit.utils import comm

pytestmark = pytest.mark.slow


def in_shards(model):
    shard_model(model, model.layers)
    return model


def in_shards_from_the_meta_device(model):
    """Only rank 0 has weights."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    model = model.to("meta")
    shard_model(model, model.layers, weights=weights if comm.is_main_process() else {})
    return model


def train(parallelize, rank=0, num_ranks=1, steps=1):
    """The losses and the final weights; ranks start with different ones, which ``parallelize`` makes equal."""
    model = parallelize(Net(seed=rank))
    data = part(rank, num_ranks, steps)
    trainer = SimpleTrainer(model, data, sgd(model, 0.05, momentum=0.9), accumulation_steps=steps)
    trainer.train(0, 10)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [loss for loss, _ in scalars(trainer)["total_loss"]], weights


def runs(rank, folder):
    """What `train` gives."""
    runs = [(in_shards, 1), (in_shards, 2), (in_shards_from_the_meta_device, 1)]
    return [train(way, rank, dist.get_world_size(), steps) for way, steps in runs]


def test_losses_and_weights_of_four_ranks_are_those_of_one_process(tmp_path):
    expected, expected_weights = train(lambda model: model)
    for by_way in on_two_ranks([runs], tmp_path, num_ranks=4)["runs"]:
        for losses, weights in by_way:
            assert losses == pytest.approx(expected, abs=1e-5, rel=0)
            torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=0)
