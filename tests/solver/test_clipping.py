import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from trainkit.config import ConfigError, get_cfg
from trainkit.solver import GradientClipper, GradientClipType, build_gradient_clipper, maybe_add_gradient_clipping


def make_cfg(clip_type="value", clip_value=1.0, norm_type=2.0, enabled=True):
    cfg = get_cfg()
    clip = cfg.SOLVER.CLIP_GRADIENTS
    clip.ENABLED, clip.CLIP_TYPE, clip.CLIP_VALUE, clip.NORM_TYPE = enabled, clip_type, clip_value, norm_type
    return cfg


def make_params(seed=0):
    """Two with gradients of norm 3 and 0.5, one without."""
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(2))]
    for param, norm in zip(params, (3.0, 0.5), strict=False):
        grad = torch.randn(param.shape, generator=generator)
        param.grad = grad * (norm / grad.norm())
    return params


def grads(params):
    return [None if param.grad is None else param.grad.clone() for param in params]


def total_norm(grads, norm_type):
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads if grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_a_config_without_clipping_gives_no_clipper():
    assert build_gradient_clipper(make_cfg(enabled=False)) is None


def test_the_enum_has_the_names_of_the_config():
    assert {kind.name: kind.value for kind in GradientClipType} == {
        "VALUE": "value",
        "NORM": "norm",
        "FULL_MODEL": "full_model",
    }


def test_value_limits_every_element():
    params, expected = make_params(), make_params()
    before = grads(params)
    norm = build_gradient_clipper(make_cfg("value", 0.1))(iter(params))
    assert torch.equal(norm, total_norm(before, 2.0))
    clip_grad_value_(expected, 0.1)
    assert_same(grads(params), grads(expected))
    assert not torch.equal(params[0].grad, before[0])
    assert max(grad.abs().max().item() for grad in grads(params)[:2]) == pytest.approx(0.1)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_norm_limits_each_parameter_on_its_own(norm_type):
    params, expected = make_params(), make_params()
    before = grads(params)
    norm = build_gradient_clipper(make_cfg("norm", 0.6, norm_type))(iter(params))
    assert torch.equal(norm, total_norm(before, norm_type))
    for param in expected:
        clip_grad_norm_([param], 0.6, norm_type)
    assert_same(grads(params), grads(expected))
    assert not torch.equal(params[0].grad, before[0])


def test_norm_leaves_a_parameter_below_the_limit_alone():
    params = make_params()
    before = grads(params)
    build_gradient_clipper(make_cfg("norm", 1.0))(params)
    assert torch.equal(params[1].grad, before[1])
    assert params[0].grad.norm().item() == pytest.approx(1.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_full_model_limits_the_norm_of_all_and_returns_it_as_a_tensor(norm_type):
    params, expected = make_params(), make_params()
    norm = build_gradient_clipper(make_cfg("full_model", 0.6, norm_type))(iter(params))
    expected_norm = clip_grad_norm_(expected, 0.6, norm_type)
    assert isinstance(norm, torch.Tensor)
    assert torch.equal(norm, expected_norm)
    assert_same(grads(params), grads(expected))


def test_full_model_scales_all_gradients_alike():
    params = make_params()
    before = grads(params)
    norm = GradientClipper("full_model", 1.0)(params)
    assert norm.item() == pytest.approx(math.hypot(3.0, 0.5))
    for param, old in zip(params[:2], before, strict=False):
        torch.testing.assert_close(param.grad, old / math.hypot(3.0, 0.5))


@pytest.mark.parametrize("clip_type", ["value", "norm", "full_model"])
def test_without_gradients_there_is_nothing_to_clip(clip_type):
    assert GradientClipper(clip_type, 1.0)([]).item() == 0.0
    assert GradientClipper(clip_type, 1.0)([nn.Parameter(torch.zeros(2))]).item() == 0.0


@pytest.mark.parametrize("clip_type", ["value", "norm", "full_model"])
def test_a_norm_that_is_not_finite_is_returned_and_no_error(clip_type):
    params = make_params()
    params[0].grad[0, 0] = math.nan
    assert math.isnan(GradientClipper(clip_type, 1.0)(params).item())


@pytest.mark.parametrize("clip_type", ["value", "norm", "full_model"])
def test_clipping_again_changes_nothing(clip_type):
    params = make_params()
    clipper = GradientClipper(clip_type, 0.3)
    before = grads(params)
    clipper(params)
    once = grads(params)
    clipper(params)
    assert not torch.allclose(once[0], before[0], rtol=1e-2)
    for twice, first in zip(grads(params)[:2], once, strict=False):
        # The norms divide by (norm + 1e-6), as torch does, and may find the limit passed by that much.
        torch.testing.assert_close(twice, first, rtol=0.0 if clip_type == "value" else 1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_type": "nrom"}, "CLIP_GRADIENTS.CLIP_TYPE.*one of value, norm, full_model, got 'nrom'"),
        ({"clip_value": 0.0}, "CLIP_GRADIENTS.CLIP_VALUE.*greater than 0, got 0.0"),
        ({"clip_value": -1.0}, "CLIP_GRADIENTS.CLIP_VALUE.*got -1.0"),
        ({"clip_value": math.nan}, "CLIP_GRADIENTS.CLIP_VALUE.*got nan"),
        ({"norm_type": 0.0}, "CLIP_GRADIENTS.NORM_TYPE.*greater than 0, got 0.0"),
        ({"norm_type": "two"}, "CLIP_GRADIENTS.NORM_TYPE.*got 'two'"),
    ],
    ids=str,
)
def test_a_wrong_rule_is_an_error_that_names_the_key(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_gradient_clipper(make_cfg(**arguments))


# ---------------------------------------------------------------------------- clipping as a part of an optimizer


def make_optimizer(optimizer_class, params, **kwargs):
    return optimizer_class(params, lr=1.0, **kwargs)


def expected_after_step(clip):
    params = make_params()
    clip(params)
    torch.optim.SGD(params, lr=1.0).step()
    return params


CLIP_BY_ALL = {
    "value": lambda params: clip_grad_value_(params, 0.3),
    "norm": lambda params: [clip_grad_norm_([param], 0.3) for param in params],
    "full_model": lambda params: clip_grad_norm_(params, 0.3),
}


@pytest.mark.parametrize("clip_type", CLIP_BY_ALL)
@pytest.mark.parametrize("as_class", [True, False], ids=["class", "instance"])
def test_an_optimizer_clips_before_its_step(clip_type, as_class):
    cfg, params = make_cfg(clip_type, 0.3), make_params()
    if as_class:
        optimizer = make_optimizer(maybe_add_gradient_clipping(cfg, torch.optim.SGD), params)
    else:
        optimizer = maybe_add_gradient_clipping(cfg, make_optimizer(torch.optim.SGD, params))
    optimizer.step()
    assert_same([*params], expected_after_step(CLIP_BY_ALL[clip_type]))
    unclipped = expected_after_step(lambda params: None)
    assert not torch.equal(params[0], unclipped[0])


def test_clipping_covers_every_group():
    params = make_params()
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    maybe_add_gradient_clipping(make_cfg("full_model", 0.3), make_optimizer(torch.optim.SGD, groups)).step()
    assert_same([*params], expected_after_step(CLIP_BY_ALL["full_model"]))


def test_an_instance_stays_the_same_object_of_the_same_class():
    optimizer = make_optimizer(torch.optim.SGD, make_params())
    assert maybe_add_gradient_clipping(make_cfg(), optimizer) is optimizer
    assert type(optimizer) is torch.optim.SGD


def test_disabled_clipping_gives_the_argument_back_and_does_not_clip():
    cfg, params = make_cfg(enabled=False), make_params()
    assert maybe_add_gradient_clipping(cfg, torch.optim.SGD) is torch.optim.SGD
    optimizer = make_optimizer(torch.optim.SGD, params)
    assert maybe_add_gradient_clipping(cfg, optimizer) is optimizer
    optimizer.step()
    assert_same([*params], expected_after_step(lambda params: None))


def test_a_clipping_class_can_be_subclassed_again():
    clipping = maybe_add_gradient_clipping(make_cfg("value", 0.3), torch.optim.SGD)
    steps = []

    class Counting(clipping):
        def __init__(self, params, lr):
            super().__init__(params, lr=lr)

        def step(self, closure=None):
            steps.append(1)
            return super().step(closure)

    params = make_params()
    optimizer = Counting(params, lr=1.0)
    optimizer.step()
    assert steps == [1]
    assert isinstance(optimizer, torch.optim.SGD)
    assert_same([*params], expected_after_step(CLIP_BY_ALL["value"]))


def test_two_rules_can_be_added_to_one_class():
    by_value = maybe_add_gradient_clipping(make_cfg("value", 0.5), torch.optim.SGD)
    both = maybe_add_gradient_clipping(make_cfg("full_model", 0.3), by_value)
    params = make_params()
    make_optimizer(both, params).step()

    def clip(params):
        clip_grad_value_(params, 0.5)
        clip_grad_norm_(params, 0.3)

    assert_same([*params], expected_after_step(clip))


def test_the_same_rule_is_added_once():
    cfg, params = make_cfg("norm", 0.3), make_params()
    clipping = maybe_add_gradient_clipping(cfg, torch.optim.SGD)
    assert maybe_add_gradient_clipping(cfg, clipping) is clipping
    optimizer = maybe_add_gradient_clipping(cfg, make_optimizer(clipping, params))
    assert optimizer.gradient_clipper == build_gradient_clipper(cfg)
    optimizer.step()
    assert_same([*params], expected_after_step(CLIP_BY_ALL["norm"]))


def test_the_class_of_the_optimizer_stays_as_it_was():
    maybe_add_gradient_clipping(make_cfg("value", 0.3), torch.optim.SGD)
    params = make_params()
    make_optimizer(torch.optim.SGD, params).step()
    assert_same([*params], expected_after_step(lambda params: None))


@pytest.mark.parametrize("argument", ["SGD", nn.Linear, 3])
def test_what_is_no_optimizer_is_an_error(argument):
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer or a subclass of it, got"):
        maybe_add_gradient_clipping(make_cfg(), argument)


def scaled_step(fused, unscale):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    params = make_params()
    optimizer = make_optimizer(torch.optim.SGD, params, fused=fused)
    maybe_add_gradient_clipping(make_cfg("value", 0.3), optimizer)
    scaler.scale(torch.zeros(()))
    for param in params[:2]:
        param.grad *= 1024.0
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return params


@pytest.mark.parametrize(("fused", "unscale"), [(False, False), (False, True), (True, True)])
def test_under_a_grad_scaler_the_true_gradients_are_clipped(fused, unscale):
    expected = expected_after_step(CLIP_BY_ALL["value"])
    for param, other in zip(scaled_step(fused, unscale), expected, strict=True):
        torch.testing.assert_close(param, other)


def test_a_fused_optimizer_with_scaled_gradients_is_an_error():
    with pytest.raises(RuntimeError, match=r"still scaled.*call scaler.unscale_\(optimizer\) before scaler.step"):
        scaled_step(fused=True, unscale=False)
