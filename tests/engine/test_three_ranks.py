"""Three ranks add up gradients in the same order in a resumed run."""

import os

import pytest
import torch
from torch import nn

from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer
from trainkit.engine import hooks, step
from trainkit.engine.parallel import create_ddp_model
from trainkit.engine.step import SimpleTrainer

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Calls its layers in another order than it has them, so that DDP puts its buckets into another one."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(37, 37) for _ in range(5))
        self.norm = nn.BatchNorm1d(37)
        self.calls = 0
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, x):
        self.calls += 1
        for i in (3, 0, 4, 1, 2):
            x = torch.tanh(self.layers[i](x)) + x
        return (self.norm(x) * torch.rand(x.shape)).square().mean()


class WithoutThePass(SimpleTrainer):
    def run_step(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "settle_buckets", lambda *args: None)
            super().run_step()


def make(rank, folder, trainer_class=SimpleTrainer, **options):
    model = create_ddp_model(Net(), **{"broadcast_buffers": False, **options})
    generator = torch.Generator().manual_seed(rank)
    data = [torch.randn(4, 37, generator=generator)] * 100
    trainer = trainer_class(model, data, torch.optim.SGD(model.parameters(), 0.1))
    checkpointer = Checkpointer(model, folder, trainer=trainer)
    trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 4)])
    return trainer, checkpointer


def a_resumed_run_ends_with_the_same_bits(rank, folder, trainer_class=SimpleTrainer, **options):
    torch.manual_seed(rank)
    whole, _ = make(rank, os.path.join(folder, "whole"), trainer_class, **options)
    whole.train(0, 12)
    torch.manual_seed(9)
    resumed, checkpointer = make(rank, "", trainer_class, **options)
    checkpointer.load(os.path.join(folder, "whole", "model_0000003.pth"))
    resumed.train(4, 12)
    pairs = zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs), whole.model.module.calls


def without_the_pass_before_the_first_step_it_does_not(rank, folder):
    return a_resumed_run_ends_with_the_same_bits(rank, folder, WithoutThePass)


OPTIONS = ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "fp16_compression")


def with_each_option_of_ddp_it_does(rank, folder):
    return [a_resumed_run_ends_with_the_same_bits(rank, os.path.join(folder, name), **{name: True}) for name in OPTIONS]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    checks = [
        a_resumed_run_ends_with_the_same_bits,
        without_the_pass_before_the_first_step_it_does_not,
        with_each_option_of_ddp_it_does,
    ]
    return on_two_ranks(checks, tmp_path_factory.mktemp("ranks"), num_ranks=3)


def test_a_resumed_run_of_three_ranks_ends_with_the_same_bits(found):
    assert found["a_resumed_run_ends_with_the_same_bits"] == [(True, 13)] * 3


def test_without_the_pass_before_the_first_step_it_does_not(found):
    assert found["without_the_pass_before_the_first_step_it_does_not"] == [(False, 12)] * 3


def test_with_each_option_of_ddp_it_does(found):
    assert found["with_each_option_of_ddp_it_does"] == [[(True, 13)] * 3 + [(True, 14), (True, 13)]] * 3
