"""Build an optimizer and its learning-rate schedule from a config."""

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, overload

import torch
from fvcore.common import param_scheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.config.checks import warmup_length
from trainkit.config.config import CfgNode
from trainkit.config.projects import prepare_projects
from trainkit.solver.clipping import GradientClipper, clip_before_step

# detectron2's users find these here
from trainkit.solver.clipping import (
    GradientClipType as GradientClipType,
)
from trainkit.solver.lr_scheduler import LRMultiplier, ScheduledLR, WarmupParamScheduler
from trainkit.solver.param_groups import _expand_param_groups as _expand_param_groups
from trainkit.solver.param_groups import get_default_optimizer_params, start_momentum
from trainkit.solver.param_groups import reduce_param_groups as reduce_param_groups
from trainkit.utils.errors import ConfigError, look_up, not_accepted, unknown_name
from trainkit.utils.periods import is_whole, say_done
from trainkit.utils.registry import Registry

_logger = logging.getLogger(__name__)


OPTIMIZER_REGISTRY = Registry("OPTIMIZER")
"""Classes and functions that take ``(params, **kwargs)`` and return an optimizer.

They are preferred over those of ``torch.optim``.
"""

PARAM_GROUP_REGISTRY = Registry("PARAM_GROUP")
"""SOLVER.PARAM_GROUP_BUILDER -> a function ``(cfg, model)`` that returns parameter groups."""

OPTIMIZER_BUILDER_REGISTRY = Registry("OPTIMIZER_BUILDER")
"""SOLVER.OPTIMIZER_BUILDER -> a function ``(cfg, model)`` that returns an optimizer.

It may call `build_one`.
"""

LR_SCHEDULER_BUILDER_REGISTRY = Registry("LR_SCHEDULER_BUILDER")
"""SOLVER.LR_SCHEDULER_BUILDER -> a function ``(cfg, optimizer)`` that returns a scheduler."""


def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Build the optimizer ``SOLVER.OPTIMIZER.NAME``.

    It clips by ``SOLVER.CLIP_GRADIENTS`` in ``step()``. The other keys of ``SOLVER.OPTIMIZER`` are
    constructor arguments in upper case; None means not given. Arguments that are not given there
    come from ``SOLVER``: ``BASE_LR``, ``MOMENTUM``, ``NESTEROV`` and ``WEIGHT_DECAY`` if the
    optimizer takes them, and keys that your code has added. Without ``FUSED`` or ``FOREACH``, the
    fused implementation is used if it works for all parameters.

    Raises:
        ConfigError: a name or an argument is unknown, or the optimizer refuses a value; one of
            these keys of ``SOLVER`` is set, but the optimizer does not take it; the model has no
            trainable parameter.
    """
    cfg = prepare_projects(cfg)
    # many configs written for detectron2 have a name here
    if isinstance(cfg.SOLVER.OPTIMIZER, str):
        cfg = with_optimizer(cfg, {"NAME": cfg.SOLVER.OPTIMIZER})
    name = cfg.SOLVER.OPTIMIZER_BUILDER
    if name:
        called_with = ("cfg", "model")
        build = look_up(OPTIMIZER_BUILDER_REGISTRY, name, "SOLVER.OPTIMIZER_BUILDER", called_with)
    else:
        build = build_one
    optimizer = build(cfg, model)
    return maybe_add_gradient_clipping(cfg, optimizer)


def with_optimizer(cfg: CfgNode, node: Mapping[str, Any]) -> CfgNode:
    """A copy of ``cfg`` with another node SOLVER.OPTIMIZER."""
    cfg = cfg.clone()
    cfg.SOLVER["OPTIMIZER"] = CfgNode({**node})  # by item, which works for a frozen node too
    return cfg


def build_one(cfg: CfgNode, model: nn.Module, only: Collection[Tensor] | None = None) -> Optimizer:
    """The optimizer of SOLVER.OPTIMIZER, for all trainable parameters or only those in ``only``."""
    name = cfg.SOLVER.OPTIMIZER.NAME
    make_optimizer = _find_optimizer(cfg)
    arguments = collect_arguments(cfg)
    groups = []
    params: list[Tensor] = []
    for group in _build_groups(cfg, model, arguments):
        members = [param for param in group["params"] if only is None or param in only]
        if members:
            groups.append({**group, "params": members})
            params.extend(members)
    if not params:
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameters; set requires_grad=True"
        )
    if _can_be_fused(make_optimizer, arguments, params, model):
        arguments["fused"] = True
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    try:
        optimizer = make_optimizer(groups, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        accepted = ", ".join(inspect.signature(make_optimizer).parameters)
        raise ConfigError(
            f"SOLVER.OPTIMIZER: {name} refuses {given}: {error} (it takes {accepted})"
        ) from error
    start_momentum(optimizer)
    # a state of an optimizer that is not fused has no zeros
    optimizer.register_load_state_dict_post_hook(start_momentum)
    _logger.info("%s of %d parameters in %d groups: %s", name, len(params), len(groups), given)
    return optimizer


def _build_groups(
    cfg: CfgNode, model: nn.Module, arguments: Mapping[str, Any]
) -> Iterable[Mapping[str, Any]]:
    solver = cfg.SOLVER
    if solver.PARAM_GROUP_BUILDER:
        build = look_up(
            PARAM_GROUP_REGISTRY,
            solver.PARAM_GROUP_BUILDER,
            "SOLVER.PARAM_GROUP_BUILDER",
            ("cfg", "model"),
        )
        return build(cfg, model)
    weight_decay = arguments.get("weight_decay")
    if weight_decay is None:  # the optimizer does not take it
        weight_decay_norm = None
        weight_decay_bias = None
    else:
        weight_decay_norm = solver.WEIGHT_DECAY_NORM
        weight_decay_bias = solver.WEIGHT_DECAY_BIAS
    return get_default_optimizer_params(
        model,
        arguments["lr"],
        weight_decay,
        weight_decay_norm,
        solver.BIAS_LR_FACTOR,
        weight_decay_bias,
        all_biases=solver.ALL_BIASES,
    )


def _find_optimizer(cfg: CfgNode) -> Callable[..., Optimizer]:
    """The class, or function, that is called SOLVER.OPTIMIZER.NAME."""
    name = cfg.SOLVER.OPTIMIZER.NAME
    if name in OPTIMIZER_REGISTRY:
        return OPTIMIZER_REGISTRY.get(name)
    of_torch = {}
    for torch_name, value in vars(torch.optim).items():
        # the trainers pass no closure, which LBFGS needs
        if isinstance(value, type) and torch_name != "LBFGS":
            of_torch[torch_name] = value
    if name not in of_torch:
        accepted = {*of_torch, *dict(OPTIMIZER_REGISTRY)}
        raise unknown_name("SOLVER.OPTIMIZER.NAME", name, "accepted", accepted)
    return of_torch[name]


def collect_arguments(cfg: CfgNode) -> dict[str, Any]:
    """The arguments of the constructor of SOLVER.OPTIMIZER but the parameters.

    Always includes ``lr``.
    """
    solver = cfg.SOLVER
    node = solver.OPTIMIZER
    parameters = inspect.signature(_find_optimizer(cfg)).parameters.values()
    known = {parameter.name for parameter in parameters}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    arguments = {"lr": solver.BASE_LR}
    for key in ("MOMENTUM", "NESTEROV", "WEIGHT_DECAY"):
        # NESTEROV False, and 0, ask for nothing
        is_wanted = solver.is_set(key) and bool(solver[key])
        if key.lower() in known or (takes_any and (is_wanted or key == "WEIGHT_DECAY")):
            arguments[key.lower()] = solver[key]
        elif is_wanted:
            accepted = f"that you leave the key out, or set it to 0; {node.NAME} does not take it"
            raise not_accepted(f"SOLVER.{key}", solver[key], accepted)
    for key, value in node.items():
        if key == "NAME" or value is None:
            continue
        arguments[key.lower()] = tuple(value) if isinstance(value, list) else value
    return arguments


def _can_be_fused(
    make_optimizer: Any, arguments: Mapping[str, Any], params: list[Tensor], model: nn.Module
) -> bool:
    """Whether torch 2.13 has a fused implementation for all this."""
    if {"fused", "foreach", "differentiable", "dampening"} & arguments.keys():
        return False
    if any(getattr(module, "sparse", False) for module in model.modules()):
        return False
    if not all(param.is_floating_point() for param in params):
        return False
    if make_optimizer is torch.optim.SGD:
        return all(_is_for_fused_sgd(param) for param in params)
    return make_optimizer in (torch.optim.Adam, torch.optim.AdamW)


def _is_for_fused_sgd(param: Tensor) -> bool:
    if hasattr(param, "device_mesh"):
        return False
    # on a CPU, with float16, it leaves out most values (pytorch#191763)
    return not param.is_cpu or param.itemsize >= 4


def base_lr(solver: CfgNode) -> tuple[str, Any]:
    """The key and the value of the learning rate: SOLVER.OPTIMIZER.LR wins over SOLVER.BASE_LR."""
    if not isinstance(solver.OPTIMIZER, str):  # else it is a name alone
        lr = solver.OPTIMIZER.get("LR")
        if lr is not None:
            return "SOLVER.OPTIMIZER.LR", lr
    return "SOLVER.BASE_LR", solver.BASE_LR


def build_lr_scheduler(cfg: CfgNode, optimizer: Optimizer) -> LRScheduler:
    """Build the schedule ``SOLVER.LR_SCHEDULER_NAME`` with its warm-up.

    ``SOLVER.LR_SCHEDULER_BUILDER`` may name a function that builds another one.

    ``WarmupMultiStepLR`` multiplies by ``GAMMA`` at each of ``STEPS``, ``WarmupCosineLR`` and
    ``WarmupLinearLR`` fall to ``BASE_LR_END`` along a half cosine or a line, and
    ``WarmupStepWithFixedGammaLR`` multiplies by ``GAMMA`` at ``NUM_DECAYS`` evenly spaced times. A
    warning says if the run never reaches ``BASE_LR``.

    All lengths are in iterations. ``STEPS`` beyond ``MAX_ITER`` are cut off, with a warning if they
    were set. If ``WARMUP_ITERS`` was not set, it is at most 5 % of the run.
    """
    solver = prepare_projects(cfg).SOLVER
    if solver.LR_SCHEDULER_BUILDER:
        build = look_up(
            LR_SCHEDULER_BUILDER_REGISTRY,
            solver.LR_SCHEDULER_BUILDER,
            "SOLVER.LR_SCHEDULER_BUILDER",
            ("cfg", "optimizer"),
        )
        return build(cfg, optimizer)
    name = solver.LR_SCHEDULER_NAME
    max_iter = solver.MAX_ITER
    if name not in _SCHEDULES:
        raise unknown_name("SOLVER.LR_SCHEDULER_NAME", name, "accepted", _SCHEDULES)
    if not is_whole(max_iter, 1) or not is_whole(solver.WARMUP_ITERS, 0):
        lengths = (max_iter, solver.WARMUP_ITERS)
        raise not_accepted("SOLVER.MAX_ITER and WARMUP_ITERS", lengths, "iterations")
    warmup_iters = warmup_length(solver)
    try:
        multiplier = _SCHEDULES[name](solver)
        if warmup_iters > 0:
            multiplier = WarmupParamScheduler(
                multiplier,
                solver.WARMUP_FACTOR,
                warmup_iters / max_iter,
                solver.WARMUP_METHOD,
                solver.RESCALE_INTERVAL,
            )
        scheduler = LRMultiplier(optimizer, multiplier, max_iter)
    except ValueError as error:
        raise ConfigError(
            f"SOLVER.LR_SCHEDULER_NAME {name}, WARMUP_ITERS {warmup_iters}: {error}"
        ) from error
    # the schedules rise in the warm-up and fall after it, or with GAMMA above 1 rise to the end
    turns = [0, warmup_iters - 1, warmup_iters, max_iter - 1]
    turns = [iter for iter in turns if 0 <= iter < max_iter]
    advice = "use a shorter warm-up, or SOLVER.RESCALE_INTERVAL True"
    warn_if_base_is_not_reached(scheduler, turns, advice)
    base = scheduler.base_lrs[0]
    first = scheduler.schedule(0, base)
    if warmup_iters == 0:
        _logger.info("The learning rate is %.3g at the start", first)
    else:
        _logger.info(
            "The learning rate is %.3g at the start, and %.3g after %d iterations of warm-up",
            first,
            scheduler.schedule(min(warmup_iters, max_iter - 1), base),
            warmup_iters,
        )
    return scheduler


def warn_if_base_is_not_reached(
    scheduler: ScheduledLR, iterations: Iterable[int], advice: str
) -> None:
    """Warn if the learning rate stays below that of the optimizer by more than 1 %.

    Args:
        iterations: those that are looked at; the largest rate must be in one of them.
    """
    base = scheduler.base_lrs[0]
    rates = {iter: scheduler.schedule(iter, base) for iter in iterations}
    if not rates:
        return
    largest = max(rates.values())
    if 0 <= largest < 0.99 * base:
        at = min(iter for iter, rate in rates.items() if rate == largest)
        _logger.warning(
            "The learning rate never reaches %g: the largest is %.3g, %s; %s",
            base,
            largest,
            say_done(at),
            advice,
        )


def _multi_step(solver: CfgNode) -> param_scheduler.ParamScheduler:
    if not all(is_whole(step, 0) for step in solver.STEPS):
        raise not_accepted("SOLVER.STEPS", solver.STEPS, "iterations")
    steps = [step for step in solver.STEPS if step < solver.MAX_ITER]
    if len(steps) < len(solver.STEPS) and solver.is_set("STEPS"):
        _logger.warning(
            "SOLVER.STEPS are %s, but the training ends %s", solver.STEPS, say_done(solver.MAX_ITER)
        )
    values = [solver.GAMMA**decays for decays in range(len(steps) + 1)]
    return param_scheduler.MultiStepParamScheduler(
        values, milestones=steps, num_updates=solver.MAX_ITER
    )


def _cosine(solver: CfgNode) -> param_scheduler.ParamScheduler:
    return param_scheduler.CosineParamScheduler(1.0, _end_factor(solver))


def _linear(solver: CfgNode) -> param_scheduler.ParamScheduler:
    return param_scheduler.LinearParamScheduler(1.0, _end_factor(solver))


def _end_factor(solver: CfgNode) -> float:
    """SOLVER.BASE_LR_END as a factor of the learning rate."""
    key, lr = base_lr(solver)
    if not 0.0 <= solver.BASE_LR_END <= lr or lr == 0:
        raise not_accepted(
            "SOLVER.BASE_LR_END", solver.BASE_LR_END, f"from 0 to {key}, {lr}, which must not be 0"
        )
    return float(solver.BASE_LR_END / lr)


def _fixed_gamma(solver: CfgNode) -> param_scheduler.ParamScheduler:
    return param_scheduler.StepWithFixedGammaParamScheduler(
        1.0, solver.NUM_DECAYS, solver.GAMMA, solver.MAX_ITER
    )


_SCHEDULES = {
    "WarmupMultiStepLR": _multi_step,
    "WarmupCosineLR": _cosine,
    "WarmupLinearLR": _linear,
    "WarmupStepWithFixedGammaLR": _fixed_gamma,
}


def build_gradient_clipper(cfg: CfgNode) -> GradientClipper | None:
    """The clipper of ``SOLVER.CLIP_GRADIENTS``; None if clipping is off."""
    clip = cfg.SOLVER.CLIP_GRADIENTS
    if not clip.ENABLED:
        return None
    return GradientClipper(clip.CLIP_TYPE, clip.CLIP_VALUE, clip.NORM_TYPE)


@overload
def maybe_add_gradient_clipping(cfg: CfgNode, optimizer: Optimizer) -> Optimizer: ...


@overload
def maybe_add_gradient_clipping(
    cfg: CfgNode, optimizer: type[Optimizer]
) -> Callable[..., Optimizer]: ...


def maybe_add_gradient_clipping(
    cfg: CfgNode, optimizer: Optimizer | type[Optimizer]
) -> Optimizer | Callable[..., Optimizer]:
    """Let an optimizer, or a class of optimizers, clip by ``SOLVER.CLIP_GRADIENTS`` in ``step()``.

    It gets a clipper as its attribute ``gradient_clipper``. If a trainer has called this clipper
    for a step, ``step()`` does not clip again. With a ``GradScaler`` and a fused optimizer, call
    ``scaler.unscale_(optimizer)`` before ``scaler.step(optimizer)``.

    Returns:
        The same instance; for a class, a function that takes the arguments of the class and returns
        an instance that clips. Unchanged if it clips already or clipping is off.
    """
    clipper = build_gradient_clipper(cfg)
    if clipper is None or hasattr(optimizer, "gradient_clipper"):
        return optimizer
    if isinstance(optimizer, Optimizer):
        clip_before_step(optimizer, clipper)
        return optimizer
    optimizer_class = optimizer

    def make_clipping(*args: Any, **kwargs: Any) -> Optimizer:
        return maybe_add_gradient_clipping(cfg, optimizer_class(*args, **kwargs))

    return make_clipping
