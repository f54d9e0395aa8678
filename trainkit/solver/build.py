"""Build an optimizer and its learning-rate schedule from a config."""

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from fvcore.common.param_scheduler import (
    CosineParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
    StepWithFixedGammaParamScheduler,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.config.config import CfgNode
from trainkit.config.defaults import get_cfg
from trainkit.config.errors import ConfigError, look_up, not_accepted, unknown_name
from trainkit.config.imports import prepare_projects
from trainkit.config.scaling import optimizer_argument
from trainkit.solver.clipping import GradientClipType as GradientClipType  # detectron2's users find these here
from trainkit.solver.clipping import maybe_add_gradient_clipping
from trainkit.solver.lr_scheduler import LRMultiplier, WarmupParamScheduler
from trainkit.solver.param_groups import _expand_param_groups as _expand_param_groups
from trainkit.solver.param_groups import get_default_optimizer_params
from trainkit.solver.param_groups import reduce_param_groups as reduce_param_groups
from trainkit.utils.numbers import is_whole
from trainkit.utils.registry import Registry

_logger = logging.getLogger(__name__)

OPTIMIZER_REGISTRY = Registry("OPTIMIZER")
"""Classes and functions that take ``(params, **kwargs)`` and return an optimizer; preferred over ``torch.optim``."""

PARAM_GROUP_REGISTRY = Registry("PARAM_GROUP")
"""SOLVER.PARAM_GROUP_BUILDER -> a function ``(cfg, model)`` that returns the parameter groups of the optimizer."""

OPTIMIZER_BUILDER_REGISTRY = Registry("OPTIMIZER_BUILDER")
"""SOLVER.OPTIMIZER_BUILDER -> a function ``(cfg, model)`` that returns an optimizer; it may call `build_one`."""

LR_SCHEDULER_BUILDER_REGISTRY = Registry("LR_SCHEDULER_BUILDER")
"""SOLVER.LR_SCHEDULER_BUILDER -> a function ``(cfg, optimizer)`` that returns a scheduler."""

_OF_SOLVER = ("MOMENTUM", "NESTEROV", "WEIGHT_DECAY", "WEIGHT_DECAY_NORM", "WEIGHT_DECAY_BIAS")


def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Build the optimizer ``SOLVER.OPTIMIZER.NAME`` over parameter groups by the rules of detectron2's keys.

    The other keys of ``SOLVER.OPTIMIZER`` are constructor arguments in upper case; None means not given. Arguments that
    are not given there come from ``SOLVER``: ``BASE_LR``, ``MOMENTUM``, ``NESTEROV`` and ``WEIGHT_DECAY`` if the
    optimizer takes them, and keys that your code has added. Without ``FUSED`` or ``FOREACH``, the fused implementation
    is used if it works for all parameters. With ``SOLVER.CLIP_GRADIENTS``, ``step()`` clips.

    Raises:
        ConfigError: the optimizer, a builder or an argument is unknown, or the optimizer refuses a value; a key of
            ``SOLVER`` that the optimizer does not take is set; the model has no trainable parameter.
    """
    cfg = prepare_projects(cfg)
    if isinstance(cfg.SOLVER.OPTIMIZER, str):  # many configs written for detectron2 have a name here
        cfg = with_optimizer(cfg, {"NAME": cfg.SOLVER.OPTIMIZER})
    name = cfg.SOLVER.OPTIMIZER_BUILDER
    build = look_up(OPTIMIZER_BUILDER_REGISTRY, name, "SOLVER.OPTIMIZER_BUILDER") if name else build_one
    return maybe_add_gradient_clipping(cfg, build(cfg, model))


def with_optimizer(cfg: CfgNode, node: Mapping[str, Any]) -> CfgNode:
    """A copy of ``cfg`` with another node SOLVER.OPTIMIZER."""
    return CfgNode({**cfg, "SOLVER": {**cfg.SOLVER, "OPTIMIZER": {**node}}})


def build_one(cfg: CfgNode, model: nn.Module, only: Collection[Tensor] | None = None) -> Optimizer:
    """The optimizer of SOLVER.OPTIMIZER, for all trainable parameters or only those in ``only``."""
    factory, arguments = _find_optimizer(cfg), collect_arguments(cfg)
    values = {name: value for name, (_, value) in arguments.items()}
    groups = [{**group, "params": [*group["params"]]} for group in _build_groups(cfg, model, values)]
    if only is not None:
        groups = [{**group, "params": [param for param in group["params"] if param in only]} for group in groups]
        groups = [group for group in groups if group["params"]]
    params = [param for group in groups for param in group["params"]]
    if not params:
        raise ConfigError(f"{type(model).__name__} has no trainable parameters; set requires_grad=True")
    try:
        if _can_be_fused(factory, values, params, model):
            values["fused"] = True
        optimizer = factory(groups, **values)
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.values())
        raise ConfigError(f"{cfg.SOLVER.OPTIMIZER.NAME} refuses {given}: {error}") from error
    if type(optimizer) is torch.optim.SGD and optimizer.defaults["fused"]:
        optimizer.register_step_pre_hook(partial(start_late_buffers, len(params)))
    _logger.info("%s of %d parameters in %d groups: %s", type(optimizer).__name__, len(params), len(groups), values)
    return optimizer


def _build_groups(cfg: CfgNode, model: nn.Module, values: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    solver = cfg.SOLVER
    if builder := solver.PARAM_GROUP_BUILDER:
        groups: Iterable[Any] = look_up(PARAM_GROUP_REGISTRY, builder, "SOLVER.PARAM_GROUP_BUILDER")(cfg, model)
        return groups
    decay = values.get("weight_decay")
    norm, bias = (solver.WEIGHT_DECAY_NORM, solver.WEIGHT_DECAY_BIAS) if decay is not None else (None, None)
    return get_default_optimizer_params(model, values["lr"], decay, norm, solver.BIAS_LR_FACTOR, bias)


def _find_optimizer(cfg: CfgNode) -> Callable[..., Optimizer]:
    name = cfg.SOLVER.OPTIMIZER.NAME
    # the trainers pass no closure, which LBFGS needs
    known = {key: value for key, value in vars(torch.optim).items() if isinstance(value, type) and key != "LBFGS"}
    known |= {name: OPTIMIZER_REGISTRY.get(name)} if name in OPTIMIZER_REGISTRY else {}
    if name not in known:
        raise unknown_name("SOLVER.OPTIMIZER.NAME", name, "accepted", {*known, *dict(OPTIMIZER_REGISTRY)})
    return known[name]


def collect_arguments(cfg: CfgNode) -> dict[str, tuple[str, Any]]:
    """argument -> (key in the config, value) for the constructor of SOLVER.OPTIMIZER; always includes ``lr``."""
    solver, defaults = cfg.SOLVER, get_cfg().SOLVER
    _, *parameters = inspect.signature(_find_optimizer(cfg)).parameters.values()
    accepted = {p.name.upper(): p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    keys = ["LR", *(key for key in solver if key in accepted and key not in defaults)]  # added by the user's own code
    for key in _OF_SOLVER:
        argument = key.removesuffix("_NORM").removesuffix("_BIAS")  # both need the argument weight_decay
        is_set = bool(solver[key]) and solver[key] != defaults[key]
        if argument in accepted or (takes_any and (is_set or argument == "WEIGHT_DECAY")):
            keys.append(argument)
        elif is_set:
            accepts = f"{defaults[key]!r}, since {solver.OPTIMIZER.NAME} takes no {argument.lower()}"
            raise not_accepted(f"SOLVER.{key}", solver[key], accepts)
    for key in solver.OPTIMIZER.keys() - {"NAME"} - accepted.keys():
        if not takes_any:
            raise unknown_name("SOLVER.OPTIMIZER", key, f"{solver.OPTIMIZER.NAME} takes", accepted)
    arguments: dict[str, tuple[str, Any]] = {}
    for key in dict.fromkeys([*keys, *(key for key in solver.OPTIMIZER if key != "NAME")]):
        full_key, value = optimizer_argument(solver, key)
        if key in ("LR", "WEIGHT_DECAY") and not isinstance(value, int | float):
            raise not_accepted(full_key, value, "a number")
        if isinstance(value, list) and key in accepted and isinstance(accepted[key].default, tuple):
            value = tuple(value)
        if value is not None:
            arguments[accepted[key].name if key in accepted else key.lower()] = full_key, value
    return arguments


def _can_be_fused(factory: Any, values: Mapping[str, Any], params: list[Tensor], model: nn.Module) -> bool:
    """Whether the fused implementation works: its first step shows it, on a small tensor of each kind of parameter."""
    known = inspect.signature(factory).parameters if isinstance(factory, type) else {}
    small = any(param.is_cpu and param.dtype in (torch.float16, torch.bfloat16) for param in params)
    if "fused" not in known or {"fused", "foreach"} & values.keys():
        return False
    if factory is torch.optim.SGD and small:
        return False  # torch 2.13 does not update most of their values (pytorch#191763)
    sparse = {module.weight for module in model.modules() if getattr(module, "sparse", False)}
    kinds = {(p.device, p.dtype, getattr(p, "device_mesh", None), p in sparse): p for p in params}
    stand_ins = []
    for (*_, is_sparse), like in kinds.items():
        stand_ins.append(like.detach().new_zeros(1, 1).requires_grad_())
        grad = torch.zeros_like(stand_ins[-1])
        stand_ins[-1].grad = grad.to_sparse(1) if is_sparse else grad
    try:
        factory(stand_ins, **values, fused=True).step()
    except (RuntimeError, AssertionError):
        return False
    return True


def start_late_buffers(num_params: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give parameters whose first gradient comes late a momentum buffer; torch's fused SGD fails without one."""
    state = optimizer.state
    if state and len(state) < num_params:
        for group in optimizer.param_groups:
            if group.get("fused") and group.get("momentum"):
                late = [param for param in group["params"] if param.grad is not None and param not in state]
                state.update({param: {"momentum_buffer": torch.zeros_like(param)} for param in late})


def build_lr_scheduler(cfg: CfgNode, optimizer: Optimizer) -> LRScheduler:
    """Build the schedule ``SOLVER.LR_SCHEDULER_NAME`` with its warm-up; after ``MAX_ITER`` the last value stays.

    ``WarmupMultiStepLR`` multiplies by ``GAMMA`` at each of ``STEPS``, ``WarmupCosineLR`` falls to ``BASE_LR_END``, and
    ``WarmupStepWithFixedGammaLR`` multiplies by ``GAMMA`` at ``NUM_DECAYS`` evenly spaced times. All lengths are in
    iterations; ``trainkit.config.resolve_lengths`` converts epochs. A default ``WARMUP_ITERS`` is at most 5 % of the
    run, and default ``STEPS`` beyond ``MAX_ITER`` are cut off. ``SOLVER.LR_SCHEDULER_BUILDER`` names a function that
    makes another schedule.

    Raises:
        ConfigError: the name is unknown, or a value is not accepted.
    """
    solver = prepare_projects(cfg).SOLVER
    if builder := solver.LR_SCHEDULER_BUILDER:
        scheduler: LRScheduler = look_up(LR_SCHEDULER_BUILDER_REGISTRY, builder, "LR_SCHEDULER_BUILDER")(cfg, optimizer)
        return scheduler
    if (name := solver.LR_SCHEDULER_NAME) not in _SCHEDULES:
        raise unknown_name("SOLVER.LR_SCHEDULER_NAME", name, "accepted", _SCHEDULES)
    max_iter, warmup = solver.MAX_ITER, solver.WARMUP_ITERS
    if not is_whole(max_iter, 1) or not all(is_whole(length, 0) for length in (warmup, *solver.STEPS)):
        raise not_accepted("SOLVER.MAX_ITER, WARMUP_ITERS and STEPS", (max_iter, warmup, solver.STEPS), "iterations")
    if warmup == get_cfg().SOLVER.WARMUP_ITERS:  # the user has not set it
        warmup = min(warmup, max_iter // 20)
    if warmup > max_iter:
        raise not_accepted("SOLVER.WARMUP_ITERS", warmup, f"at most SOLVER.MAX_ITER, {max_iter}")
    options = (solver.WARMUP_FACTOR, warmup / max_iter, solver.WARMUP_METHOD, solver.RESCALE_INTERVAL)
    try:
        scheduler = LRMultiplier(optimizer, WarmupParamScheduler(_SCHEDULES[name](solver), *options), max_iter)
    except ValueError as error:
        raise ConfigError(f"SOLVER.LR_SCHEDULER_NAME {name}: {error}") from error
    base = scheduler.base_lrs[0]
    rates = scheduler.schedule(0, base), scheduler.schedule(min(warmup, max_iter - 1), base)
    _logger.info("The learning rate is %g at the start, and %g after %d iterations of warm-up", *rates, warmup)
    return scheduler


def _multi_step(solver: CfgNode) -> ParamScheduler:
    steps = [step for step in solver.STEPS if step < solver.MAX_ITER]
    if len(steps) < len(solver.STEPS) and (*solver.STEPS,) != get_cfg().SOLVER.STEPS:
        _logger.warning("SOLVER.STEPS are %s, but the training ends at %d", solver.STEPS, solver.MAX_ITER)
    values = [solver.GAMMA**decays for decays in range(len(steps) + 1)]
    return MultiStepParamScheduler(values, milestones=steps, num_updates=solver.MAX_ITER)


def _cosine(solver: CfgNode) -> ParamScheduler:
    key, lr = optimizer_argument(solver, "LR")
    if not 0.0 <= solver.BASE_LR_END <= lr or lr == 0:
        raise not_accepted("SOLVER.BASE_LR_END", solver.BASE_LR_END, f"from 0 to {key}, {lr}, which must not be 0")
    return CosineParamScheduler(1.0, solver.BASE_LR_END / lr)


def _fixed_gamma(solver: CfgNode) -> ParamScheduler:
    return StepWithFixedGammaParamScheduler(1.0, solver.NUM_DECAYS, solver.GAMMA, solver.MAX_ITER)


_SCHEDULES = {"WarmupMultiStepLR": _multi_step, "WarmupCosineLR": _cosine, "WarmupStepWithFixedGammaLR": _fixed_gamma}
