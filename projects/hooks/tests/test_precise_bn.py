import random

import numpy as np
import torch
from torch import nn

from tests.engine.tiny import Steps, batches
from trainkit.engine.hooks import PreciseBN
from trainkit.utils.events import EventStorage, get_event_storage


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5))
        self.second = nn.BatchNorm1d(3, momentum=None)  # a cumulative average

    def forward(self, batch):
        get_event_storage().put_scalar("seen", 1.0)
        assert not torch.is_grad_enabled()
        random.random()
        np.random.rand()
        return self.second(self.first(batch).mean((2, 3)))


def test_the_statistics_are_those_of_the_population_of_batches():
    """Several ranks are in tests/engine/test_metrics.py."""
    data = [x for x, _ in batches(5, size=40)]
    layer, exact = nn.BatchNorm1d(3), torch.stack(data).double()
    PreciseBN(1, layer, data, num_iter=100).update_stats()
    mean = exact.mean((0, 1))
    # the law of total variance: within the batches (torch's unbiased one), and between their means
    var = exact.var(1, correction=1).mean(0) + exact.mean(1).var(0, correction=0)
    found = layer.running_mean.double(), layer.running_var.double()
    torch.testing.assert_close(found, (mean, var), rtol=1e-5, atol=1e-6)


def test_nothing_but_the_running_statistics_is_touched():
    model = Net()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hook = PreciseBN(1, model, torch.randn(3, 4, 2, 6, 6), num_iter=3)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with EventStorage() as storage:
        hook.update_stats()
        assert storage.latest() == {}
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{layer}.running_{kind}" for layer in ("first.1", "second") for kind in ("mean", "var")}
    assert all(torch.equal(p.grad, torch.full_like(p, 0.5)) for p in model.parameters())
    assert (model.first[1].momentum, model.second.momentum) == (0.1, None)
    assert all(module.training for module in model.modules())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_it_runs_every_period_and_after_the_last_iteration():
    seen = []

    class Loader:
        def __iter__(self):
            seen.append(trainer.iter)
            return iter([torch.ones(2, 3)])

    trainer = Steps([PreciseBN(2, nn.BatchNorm1d(3), Loader(), num_iter=1)])
    trainer.train(0, 5)
    assert seen == [1, 3, 4]


def test_without_batch_norm_in_train_mode_it_warns_and_does_nothing(caplog):
    model = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False))
    trainer = Steps([PreciseBN(1, model, None, num_iter=1)])
    assert "PreciseBN is off" in caplog.text
    trainer.train(0, 2)
    assert trainer.status == "finished"
