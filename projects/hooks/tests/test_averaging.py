"""Averages of weights, against formulas, printed values and torch."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from trainkit.projects.hooks.averaging import ModelAverage, averaging_rule

from tests.cuda import host_never_waits, needs_cuda


class Net(nn.Module):
    """All kinds of tensors."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.layers[1].num_batches_tracked = None  # torch averages integers too, or fails
        self.tied = self.layers[0].weight
        self.small = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_the_weight_of_an_update_is_that_of_its_rule():
    for arguments, expected in [
        ({"decay": 0.9}, {0: 1, 1: 0.1, 9: 0.1}),
        ({"decay": 0.9, "interval": 2}, {0: 1, 1: 0, 2: 0.1}),
        ({"kind": "annealing", "decay": 0.9998}, {1: 0.990099, 3: 0.970874, 499_900: 0.0002, 10_000_000: 0.0002}),
        ({"kind": "annealing", "gamma": 1}, {3: 0.25}),
        ({"kind": "warmup", "decay": 0.9998}, {1: 0.9990007, 2000: 0.3678220, 10000: 0.0069332}),
        ({"kind": "warmup", "decay": 0.9998, "gamma": 1000}, {999: 0.3680059}),
        ({"kind": "mean"}, {1: 1 / 2, 2: 1 / 3}),
        ({"kind": "mmcv", "decay": 0.5, "gamma": 10}, {1: 2 / 11, 2: 3 / 12, 3: 4 / 13, 8: 0.5, 9: 0.5}),
        ({"kind": "mmcv", "decay": 0.5, "gamma": 10, "interval": 2}, {1: 0, 2: 0.25, 3: 0, 8: 0.25}),
        ({"kind": "mmcv", "decay": 0.9998}, {1: 0.0002, 100: 0.0002}),
    ]:
        rule = averaging_rule(**arguments)
        assert {steps: rule(steps) for steps in expected} == pytest.approx(expected, abs=1e-6), arguments


@pytest.mark.parametrize(
    ("rule", "multi_avg_fn"),
    [(averaging_rule(decay=0.3), get_ema_multi_avg_fn(0.3)), (averaging_rule("mean"), get_swa_multi_avg_fn())],
    ids=["decay", "mean"],
)
@pytest.mark.parametrize("average_buffers", [False, True])
def test_parameters_and_averaged_buffers_are_torchs_to_the_last_bit(rule, multi_avg_fn, average_buffers):
    model = Net()
    ours = ModelAverage(model, rule, average_buffers=average_buffers)
    theirs = AveragedModel(model, multi_avg_fn=multi_avg_fn, use_buffers=average_buffers)
    for _ in range(6):
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(torch.rand(tensor.shape))
        model.cache = torch.ones(7)
        ours.update()
        model.cache = torch.ones(2)
        theirs.update_parameters(model)

    found, expected = ours.state_dict(), theirs.module.state_dict()
    assert found.keys() == model.state_dict().keys()
    names = [name for name in found if average_buffers or "running" not in name]
    assert all(torch.equal(found[name], expected[name]) for name in names)
    assert not torch.equal(model.state_dict()["tied"], found["tied"])  # the comparison can fail


@pytest.mark.parametrize("average_buffers", [False, True])
def test_buffers_are_averaged_or_copied_and_a_replaced_one_is_followed(average_buffers):
    model = nn.BatchNorm1d(2)
    average = ModelAverage(model, averaging_rule(decay=0.5, interval=2), average_buffers=average_buffers)
    found = []
    for count in range(1, 5):
        model.running_mean = torch.full((2,), 2.0**count)
        model.num_batches_tracked.fill_(count)
        average.update()
        state = average.state_dict()
        found.append((state["running_mean"][0].item(), state["num_batches_tracked"].item()))
    assert found == ([(2, 1), (2, 2), (5, 3), (5, 4)] if average_buffers else [(2, 1), (4, 2), (8, 3), (16, 4)])


@needs_cuda
def test_on_cuda_an_update_never_waits():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).cuda()
    average = ModelAverage(model, averaging_rule())
    for _ in range(3):
        with host_never_waits():
            average.update()
