"""Averages of weights, against formulas, printed values and torch."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.overrides import TorchFunctionMode
from trainkit.projects.hooks.averaging import ModelAverage, averaging_rule

from tests.cuda import host_never_waits, needs_cuda


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros((), dtype=torch.float64))


def averages(rule, values):
    """The average after each of these values of a single weight."""
    model = Value()
    average = ModelAverage(model, rule)
    found = []
    for value in values:
        with torch.no_grad():
            model.value.fill_(value)
        average.update()
        found.append(average.module.value.item())
    assert average.steps == len(values)
    return found


class Net(nn.Module):
    """All kinds of tensors."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.tied = self.layers[0].weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.small = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))


@torch.no_grad()
def change(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.add_(torch.rand(tensor.shape))
        else:
            tensor += 1


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------- rules


def test_the_first_update_copies_and_the_others_are_weighted_by_the_decay():
    found = averages(averaging_rule("exponential", decay=0.9), [1, 2, 4, 8])
    assert found == pytest.approx([1, 1.1, 1.39, 2.051], abs=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.999])
def test_an_exponential_average_has_its_closed_form(decay):
    values = [3.0, -1.0, 2.5, 7.0, 0.125]
    k = len(values)
    expected = decay ** (k - 1) * values[0] + (1 - decay) * sum(decay ** (k - 1 - j) * values[j] for j in range(1, k))
    assert averages(averaging_rule(decay=decay), values)[-1] == pytest.approx(expected, abs=1e-12)


def test_annealing_begins_with_nearly_the_mean_and_ends_at_the_decay():
    rule = averaging_rule("annealing", decay=0.9998)
    assert [rule(steps) for steps in (1, 2, 3)] == pytest.approx([0.990099, 0.980392, 0.970874], abs=1e-6)
    assert rule(499_900) == pytest.approx(0.0002, abs=1e-12)
    assert rule(10_000_000) == pytest.approx(0.0002, abs=1e-15)
    assert averaging_rule("annealing", gamma=1)(3) == 0.25


def test_warmup_falls_exponentially_to_the_decay():
    rule = averaging_rule("warmup", decay=0.9998)
    found = [rule(steps) for steps in (1, 2000, 10000)]
    assert found == pytest.approx([0.9990007, 0.3678220, 0.0069332], abs=1e-7)
    assert averaging_rule("warmup", decay=0.9998, gamma=1000)(999) == pytest.approx(0.3680059, abs=1e-7)


def test_the_rule_of_mmcv_rises_to_the_power_of_the_interval():
    weights = [averaging_rule("mmcv", decay=0.5, gamma=10)(steps) for steps in (1, 2, 3, 8, 9)]
    assert weights == pytest.approx([2 / 11, 3 / 12, 4 / 13, 0.5, 0.5], abs=1e-12)
    every_second = averaging_rule("mmcv", decay=0.5, gamma=10, interval=2)
    assert [every_second(steps) for steps in (1, 2, 3, 8)] == [0, 0.25, 0, 0.25]
    usual = averaging_rule("mmcv", decay=0.9998)
    assert [usual(steps) for steps in (1, 100)] == pytest.approx([0.0002, 0.0002], abs=1e-12)


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("rule", "multi_avg_fn"),
    [
        (averaging_rule(decay=0.99), get_ema_multi_avg_fn(0.99)),
        (averaging_rule(decay=0.3), get_ema_multi_avg_fn(0.3)),
        (averaging_rule("mean"), get_swa_multi_avg_fn()),
    ],
    ids=["decay 0.99", "decay 0.3", "mean"],
)
@pytest.mark.parametrize("average_buffers", [False, True])
def test_parameters_and_averaged_buffers_are_torchs_to_the_last_bit(rule, multi_avg_fn, average_buffers):
    model = Net()
    model.layers[1].num_batches_tracked = None  # torch averages integers too, or fails
    ours = ModelAverage(model, rule, average_buffers=average_buffers)
    theirs = AveragedModel(model, multi_avg_fn=multi_avg_fn, use_buffers=average_buffers)
    others = ModelAverage(model, averaging_rule(decay=0.989999))
    for _ in range(6):
        change(model)
        ours.update()
        theirs.update_parameters(model)
        others.update()
    for name, parameter in ours.module.named_parameters():
        assert torch.equal(parameter, theirs.module.get_parameter(name)), name
    if average_buffers:
        assert torch.equal(ours.module.layers[1].running_var, theirs.module.layers[1].running_var)
    assert not torch.equal(others.module.layers[0].weight, ours.module.layers[0].weight)  # the comparison can fail


@pytest.mark.parametrize("average_buffers", [False, True])
def test_buffers_are_averaged_or_copied_in_every_update_and_counters_always_copied(average_buffers):
    model = nn.BatchNorm1d(2)
    average = ModelAverage(model, averaging_rule(decay=0.5, interval=2), average_buffers=average_buffers)
    found = []
    for count in range(1, 5):
        model.running_mean.fill_(2**count)
        model.num_batches_tracked.fill_(count)
        average.update()
        found.append((average.module.running_mean[0].item(), average.module.num_batches_tracked.item()))
    assert found == ([(2, 1), (2, 2), (5, 3), (5, 4)] if average_buffers else [(2, 1), (4, 2), (8, 3), (16, 4)])


def test_a_buffer_that_the_model_replaces_is_followed():
    model = nn.Module()
    model.register_buffer("scale", torch.tensor(1.0))
    average = ModelAverage(model, averaging_rule())
    model.scale = torch.tensor(5.0)
    average.update()
    assert average.module.scale.item() == 5.0


def test_buffers_that_a_checkpoint_does_not_hold_are_left_to_the_copy():
    model = nn.Module()
    model.register_buffer("cache", torch.ones(1), persistent=False)
    average = ModelAverage(model, averaging_rule())
    model.cache = torch.ones(7)  # grown
    average.update()
    assert average.module.cache.shape == (1,)


def test_tied_tensors_are_averaged_once():
    model = nn.Module()
    model.a = nn.BatchNorm1d(1)
    model.b = nn.Module()
    model.b.register_buffer("shared", model.a.running_mean)
    model.weight = model.a.weight
    average = ModelAverage(model, averaging_rule(decay=0.5), average_buffers=True)
    for value in (0.0, 8.0):
        with torch.no_grad():
            model.a.running_mean.fill_(value)
            model.weight.fill_(value)
        average.update()
    module = average.module
    assert (module.a.running_mean.item(), module.b.shared.item(), module.weight.item()) == (4.0, 4.0, 4.0)


def test_the_average_is_a_module_of_its_own_in_eval_mode_without_gradients():
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    average = ModelAverage(model, averaging_rule(decay=0.5))
    change(model)
    average.update()
    assert equal(average.module, model)
    with torch.no_grad():
        for tensor in average.module.state_dict().values():
            tensor.zero_()
    assert not equal(average.module, model)
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in average.module.modules())
    assert [p.requires_grad for p in model.parameters()].count(False) == 1
    assert [p.requires_grad for p in average.module.parameters()] == [p.requires_grad for p in model.parameters()]
    assert all(parameter.grad is None for parameter in average.module.parameters())


class Calls(TorchFunctionMode):
    """Notes the functions of torch that are called inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["exponential", "annealing", "warmup", "mean", "mmcv"])
def test_an_update_is_one_foreach_call_for_parameters_of_a_kind(kind):
    model = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(5)))
    average = ModelAverage(model, averaging_rule(kind))
    average.update()
    with Calls() as calls:
        average.update()
    on_tensors = [name for name in calls.names if name != "_set_grad_enabled"]
    assert on_tensors == ["_foreach_lerp_", "_foreach_copy_", "_foreach_copy_"]  # buffers of two kinds


@needs_cuda
@pytest.mark.parametrize("kind", ["exponential", "mean"])
def test_on_cuda_an_update_equals_that_on_the_cpu_and_never_waits(kind):
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device) for device in ("cpu", "cuda")]
    models[1].load_state_dict(models[0].state_dict())
    found = [ModelAverage(model, averaging_rule(kind)) for model in models]
    for _ in range(3):
        with torch.no_grad():
            models[0][0].weight.add_(0.5)
            models[1][0].weight.copy_(models[0][0].weight)
        found[0].update()
        with host_never_waits():
            found[1].update()
    torch.testing.assert_close(found[1].module.cpu().state_dict(), found[0].module.state_dict())
