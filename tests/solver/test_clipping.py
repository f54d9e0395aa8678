import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from trainkit.config import get_cfg
from trainkit.solver import (
    GradientClipper,
    build_gradient_clipper,
    maybe_add_gradient_clipping,
)


def make_cfg(clip_type="value", clip_value=1.0, norm_type=2.0, enabled=True):
    cfg = get_cfg()
    clip = cfg.SOLVER.CLIP_GRADIENTS
    clip.ENABLED, clip.CLIP_TYPE, clip.CLIP_VALUE, clip.NORM_TYPE = (
        enabled,
        clip_type,
        clip_value,
        norm_type,
    )
    return cfg


def make_params():
    """Two with gradients of norm 3 and 0.5, one without."""
    generator = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.zeros(4, 3)),
        nn.Parameter(torch.zeros(5)),
        nn.Parameter(torch.zeros(2)),
    ]
    for param, norm in zip(params, (3.0, 0.5), strict=False):
        grad = torch.randn(param.shape, generator=generator)
        param.grad = grad * (norm / grad.norm())
    return params


def grads(params):
    return [param.grad.clone() for param in params if param.grad is not None]


def of_torch(clip_type, params, value, norm_type=2.0):
    """What torch does; returns the total norm before it."""
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads(params)]
    if clip_type == "value":
        clip_grad_value_(params, value)
    for part in [params] if clip_type == "full_model" else [[param] for param in params]:
        if clip_type != "value":
            clip_grad_norm_(part, value, norm_type)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def sgd(params, optimizer_class=torch.optim.SGD, **kwargs):
    return optimizer_class(params, lr=1.0, **kwargs)


@pytest.mark.parametrize(
    ("clip_type", "norm_type"),
    [("value", 2.0), ("norm", 1.0), ("norm", math.inf), ("full_model", 2.0)],
)
def test_a_clipper_does_what_torch_does_and_returns_a_norm_that_it_needs(clip_type, norm_type):
    params, expected, before = make_params(), make_params(), grads(make_params())
    clipper = build_gradient_clipper(make_cfg(clip_type, 0.4, norm_type))
    norm = clipper(iter(params))
    norm_of_torch = of_torch(clip_type, expected, 0.4, norm_type)
    assert clipper.gives_norm == (norm is not None)
    if clip_type == "value":
        assert norm is None
    else:
        assert torch.equal(norm, norm_of_torch)
    assert all(map(torch.equal, grads(params), grads(expected)))
    assert not torch.equal(params[0].grad, before[0])


def test_no_gradients_have_norm_0_and_a_norm_that_is_not_finite_is_no_error():
    for clip_type in ("norm", "full_model"):
        assert GradientClipper(clip_type, 1.0)([nn.Parameter(torch.zeros(2))]).item() == 0.0
        params = make_params()
        params[0].grad[0, 0] = math.nan
        assert math.isnan(GradientClipper(clip_type, 1.0)(params).item())
    nothing = nn.Parameter(torch.zeros(2))
    assert GradientClipper("value", 1.0)([nothing]) is None
    assert nothing.grad is None


@pytest.mark.parametrize(
    "arguments",
    [{"clip_type": "nrom"}, {"clip_value": 0.0}, {"clip_value": math.nan}, {"norm_type": -1.0}],
    ids=str,
)
def test_a_wrong_rule_is_an_error(arguments):
    with pytest.raises(ValueError, match=r"nrom|0\.0|nan|-1\.0"):
        build_gradient_clipper(make_cfg(**arguments))
    off, optimizer = make_cfg(enabled=False), sgd(make_params())
    assert build_gradient_clipper(off) is None
    assert maybe_add_gradient_clipping(off, torch.optim.SGD) is torch.optim.SGD
    assert maybe_add_gradient_clipping(off, optimizer) is optimizer
    assert not hasattr(optimizer, "gradient_clipper")


@pytest.mark.parametrize(
    ("clip_type", "as_class"), [("value", True), ("norm", False), ("full_model", True)]
)
def test_an_optimizer_clips_all_its_groups_before_each_step(clip_type, as_class):
    cfg, params, expected = make_cfg(clip_type, 0.3), make_params(), make_params()
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    if as_class:
        clipping = maybe_add_gradient_clipping(cfg, torch.optim.SGD)
        optimizer = sgd(groups, clipping)
        # once is enough
        assert (
            optimizer.gradient_clipper
            is maybe_add_gradient_clipping(cfg, optimizer).gradient_clipper
        )
        assert type(optimizer) is torch.optim.SGD
        assert optimizer.gradient_clipper == build_gradient_clipper(cfg)
    else:
        optimizer = maybe_add_gradient_clipping(cfg, plain := sgd(groups))
        assert optimizer is plain
    optimizer.step()
    of_torch(clip_type, expected, 0.3)
    sgd(expected).step()
    assert all(map(torch.equal, params, expected))
    params[0].grad.fill_(10.0)
    optimizer.step()
    assert params[0].grad.max() < 1


def test_what_a_trainer_has_clipped_is_not_clipped_again_by_this_step_but_by_the_next():
    params = make_params()
    optimizer = maybe_add_gradient_clipping(make_cfg("norm", 0.3), sgd(params))
    optimizer.gradient_clipper(params)
    params[0].grad.mul_(10)
    optimizer.step()
    assert params[0].grad.norm().item() == pytest.approx(3.0)
    optimizer.step()
    assert params[0].grad.norm().item() == pytest.approx(0.3)


@pytest.mark.parametrize(("fused", "unscale"), [(False, False), (True, True), (True, False)])
def test_under_a_grad_scaler_the_true_gradients_are_clipped_or_an_error_says_what_to_call(
    fused, unscale
):
    scaler, params, expected = (
        torch.amp.GradScaler("cpu", init_scale=1024.0),
        make_params(),
        make_params(),
    )
    optimizer = maybe_add_gradient_clipping(make_cfg("value", 0.3), sgd(params, fused=fused))
    scaler.scale(torch.zeros(()))
    for param in params[:2]:
        param.grad *= 1024.0
    if unscale:
        scaler.unscale_(optimizer)
    if fused and not unscale:
        with pytest.raises(RuntimeError, match=r"still scaled.*call scaler.unscale_"):
            scaler.step(optimizer)
        return
    scaler.step(optimizer)
    of_torch("value", expected, 0.3)
    sgd(expected).step()
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param, other)
