import pytest
import torch
from torch import nn

from tests.cuda import host_never_waits, needs_cuda
from trainkit.solver import LARS


def scalar_lars(
    params, grads_per_step, lrs, momentum, weight_decay, dampening, eta, nesterov, eps, exclude=()
):
    """The rule, one parameter and one step at a time, as Python numbers; a parameter is a list of them."""

    def norm(values):
        return sum(value * value for value in values) ** 0.5

    params = [list(param) for param in params]
    buffers = {}
    for grads, lr in zip(grads_per_step, lrs, strict=True):
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is None:
                continue
            local, param_norm, grad_norm = 1.0, norm(param), norm(grad)
            if param_norm and grad_norm and index not in exclude:
                local = eta * param_norm / (grad_norm + weight_decay * param_norm + eps)
            update = [(g + weight_decay * w) * local * lr for g, w in zip(grad, param, strict=True)]
            buffer = update
            if index in buffers:
                buffer = [
                    momentum * b + (1 - dampening) * u
                    for b, u in zip(buffers[index], update, strict=True)
                ]
            buffers[index] = buffer
            if nesterov:
                buffer = [u + momentum * b for u, b in zip(update, buffer, strict=True)]
            params[index] = [w - u for w, u in zip(param, buffer, strict=True)]
    return params


def step(optimizer, grads):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else torch.tensor(grad, dtype=param.dtype)
    optimizer.step()


def random_job(num_steps=12):
    """Start values of four parameters (one zero), and gradients (some zero, some missing) for each step."""
    torch.manual_seed(0)
    params = [torch.randn(size, dtype=torch.float64).tolist() for size in (3, 5, 1)] + [[0.0, 0.0]]
    grads = [
        [torch.randn(len(param), dtype=torch.float64).tolist() for param in params]
        for _ in range(num_steps)
    ]
    grads[3][0] = [0.0, 0.0, 0.0]
    grads[0][1] = grads[5][1] = None  # its buffer starts later than those of the others
    return params, grads


def as_parameters(values, dtype=torch.float64):
    return [nn.Parameter(torch.tensor(value, dtype=dtype)) for value in values]


def test_the_printed_example_of_the_rule_and_a_rate_that_is_a_tensor():
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        (param,) = as_parameters([[3.0, 4.0]])
        step(LARS([param], lr=lr, weight_decay=0.01), [[0.6, 0.8]])
        assert param.tolist() == pytest.approx([2.9997, 3.9996], abs=1e-10)
        # the local rate, from the distance gone: 0.1 * local * |g + wd * w| = 0.1 * local * 1.05
        assert (5 - param.norm().item()) / 0.105 == pytest.approx(0.0047619047, abs=1e-9)


DEFAULTS = {
    "momentum": 0.0,
    "weight_decay": 0.0,
    "dampening": 0.0,
    "eta": 0.001,
    "nesterov": False,
    "eps": 1e-8,
}


@pytest.mark.parametrize(
    "setting",
    [
        {"weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.5, "eta": 0.1, "eps": 0.5},
    ],
    ids=str,
)
def test_many_steps_equal_the_rule_also_in_an_excluded_group_and_when_the_rate_changes(setting):
    values, grads = random_job()
    lrs = [0.5] * 6 + [0.05] * 6
    params = as_parameters(values)
    groups = [{"params": params[:2]}, {"params": params[2:], "lars_exclude": True}]
    optimizer = LARS(groups, lr=0.5, **setting)
    for lr, grad in zip(lrs, grads, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        step(optimizer, grad)

    def difference(**changed):
        expected = scalar_lars(
            values, grads, **{"lrs": lrs, "exclude": (2, 3), **DEFAULTS, **setting, **changed}
        )
        pairs = zip(params, expected, strict=True)
        return max(
            abs(a - b) for param, value in pairs for a, b in zip(param.tolist(), value, strict=True)
        )

    assert difference() < 1e-12
    others = {
        "lrs": [0.5] * 12,
        "exclude": (),
        "momentum": 0.8,
        "weight_decay": 0.2,
        "eta": 0.002,
        "eps": 0.1,
    }
    for name, value in others.items():
        assert difference(**{name: value}) > 1e-6


def test_norms_beyond_the_range_of_float16_are_finite():
    (param,) = as_parameters([[1000.0] * 10000], torch.float16)
    step(LARS([param], lr=1.0, eta=0.5), [[1.0] * 10000])
    assert param.unique().tolist() == [500.0]


@needs_cuda
def test_on_cuda_a_step_never_waits_and_gives_the_same_values():
    values, grads = random_job()
    on_cpu = as_parameters(values, torch.float32)
    on_cuda = [nn.Parameter(param.detach().cuda()) for param in on_cpu]
    optimizers = [
        LARS(params, lr=0.5, momentum=0.9, weight_decay=0.1, eta=0.01)
        for params in (on_cpu, on_cuda)
    ]
    for grad in grads:
        step(optimizers[0], grad)
        for param, source in zip(on_cuda, on_cpu, strict=True):
            param.grad = None if source.grad is None else source.grad.cuda()
        with host_never_waits():
            optimizers[1].step()
    for ours, expected in zip(on_cuda, on_cpu, strict=True):
        assert ours.tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)
