"""Optimizer and learning rate schedule from a config."""

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fvcore.common.param_scheduler import (
    ConstantParamScheduler,
    CosineParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
    StepWithFixedGammaParamScheduler,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.config.config import CfgNode
from trainkit.config.errors import ConfigError
from trainkit.solver.clipping import (
    GradientClipper,
    GradientClipType,
    build_gradient_clipper,
    maybe_add_gradient_clipping,
)
from trainkit.solver.lr_scheduler import KeepLastValue, LRMultiplier, WarmupParamScheduler
from trainkit.solver.param_groups import get_default_optimizer_params, reduce_param_groups
from trainkit.utils.registry import Registry

__all__ = [
    "OPTIMIZER_REGISTRY",
    "build_optimizer",
    "build_lr_scheduler",
    "GradientClipType",
    "GradientClipper",
    "build_gradient_clipper",
    "maybe_add_gradient_clipping",
    "get_default_optimizer_params",
    "reduce_param_groups",
]

_logger = logging.getLogger(__name__)

OPTIMIZER_REGISTRY = Registry("OPTIMIZER")
"""Classes and functions that take ``(params, **kwargs)`` and give an optimizer; they win over ``torch.optim``."""

_NODE = "SOLVER.OPTIMIZER"


@dataclass(frozen=True)
class _Argument:
    key: str  # where the config has it
    value: Any


def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Build the optimizer ``SOLVER.OPTIMIZER.NAME`` over the parameter groups of ``get_default_optimizer_params``.

    The other keys of ``SOLVER.OPTIMIZER`` are its constructor arguments in upper case; None means not given. ``LR`` and
    ``WEIGHT_DECAY`` there win over ``SOLVER.BASE_LR`` and ``SOLVER.WEIGHT_DECAY``; SGD takes ``SOLVER.MOMENTUM`` and
    ``SOLVER.NESTEROV`` likewise. Without ``FUSED`` or ``FOREACH``, a class runs in its fused implementation
    where that works for all parameters, else on an accelerator in its foreach one. Gradients are not clipped: the
    trainer does that.

    Raises:
        ConfigError: the optimizer or one of its arguments is unknown, or it refuses a value.
        ValueError: the model has no trainable parameter.
    """
    factory = _find_optimizer(cfg.SOLVER.OPTIMIZER.NAME)
    arguments = _collect_arguments(cfg, factory)
    values = {name: argument.value for name, argument in arguments.items()}
    decays = "weight_decay" in values
    groups = get_default_optimizer_params(
        model,
        base_lr=values["lr"],
        weight_decay=values.get("weight_decay"),
        weight_decay_norm=cfg.SOLVER.WEIGHT_DECAY_NORM if decays else None,
        bias_lr_factor=cfg.SOLVER.BIAS_LR_FACTOR,
        weight_decay_bias=cfg.SOLVER.WEIGHT_DECAY_BIAS if decays else None,
    )
    params = [param for group in groups for param in group["params"]]
    if not params:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters; at least one needs requires_grad=True to be optimized"
        )
    try:
        values |= _fastest_implementation(factory, values, params, model)
        optimizer = factory(groups, **values)
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{argument.key}={argument.value!r}" for argument in arguments.values())
        raise ConfigError(f"{cfg.SOLVER.OPTIMIZER.NAME} refuses {given}: {error}") from error
    _logger.info(
        "Optimizer %s, implementation: %s, parameter groups: %d, parameters: %d, values: %s.",
        type(optimizer).__name__,
        next((name for name in ("fused", "foreach") if values.get(name)), "default"),
        len(optimizer.param_groups),
        len(params),
        f"{sum(param.numel() for param in params):,}",
    )
    return optimizer


def _find_optimizer(name: str) -> Callable[..., Optimizer]:
    known: dict[str, Callable[..., Optimizer]] = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value not in (Optimizer, torch.optim.LBFGS)
    }
    known.update(OPTIMIZER_REGISTRY)
    if name in known:
        return known[name]
    if name == "LBFGS":
        raise ConfigError(
            f"{_NODE}.NAME: LBFGS evaluates the loss several times per step through a closure, which the trainers "
            "do not pass; choose another optimizer"
        )
    raise _unknown(f"{_NODE}.NAME", name, "accepted (your own: register it, and name its module in IMPORTS)", known)


def _collect_arguments(cfg: CfgNode, factory: Callable[..., Optimizer]) -> dict[str, _Argument]:
    """The constructor's arguments by name, ``lr`` always among them."""
    solver = cfg.SOLVER
    _, *parameters = inspect.signature(factory).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = {
        parameter.name.upper(): parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    arguments = {"lr": _Argument("SOLVER.BASE_LR", solver.BASE_LR)}
    if takes_any or "WEIGHT_DECAY" in accepted:
        arguments["weight_decay"] = _Argument("SOLVER.WEIGHT_DECAY", solver.WEIGHT_DECAY)
    elif solver.WEIGHT_DECAY or solver.WEIGHT_DECAY_NORM or solver.WEIGHT_DECAY_BIAS:
        _logger.warning("%s has no weight decay; SOLVER.WEIGHT_DECAY* have no effect.", solver.OPTIMIZER.NAME)
    if factory is torch.optim.SGD:
        arguments["momentum"] = _Argument("SOLVER.MOMENTUM", solver.MOMENTUM)
        arguments["nesterov"] = _Argument("SOLVER.NESTEROV", solver.NESTEROV)

    for key, value in solver.OPTIMIZER.items():
        if key == "NAME":
            continue
        if key not in accepted and not takes_any:
            raise _unknown(_NODE, key, f"{solver.OPTIMIZER.NAME} takes", accepted)
        if value is None:
            continue
        parameter = accepted.get(key)
        if parameter is not None and isinstance(parameter.default, tuple) and isinstance(value, list):
            value = tuple(value)
        name = parameter.name if parameter is not None else key.lower()
        if name in ("lr", "weight_decay") and name in arguments:
            if not isinstance(value, int | float):
                raise ConfigError(f"{_NODE}.{key} must be a number, got {value!r}")
            replaced = arguments[name]
            _logger.info("%s.%s=%s is used, not %s=%s.", _NODE, key, value, replaced.key, replaced.value)
        arguments[name] = _Argument(f"{_NODE}.{key}", value)
    return arguments


def _fastest_implementation(
    factory: Callable[..., Optimizer], values: Mapping[str, Any], params: list[Tensor], model: nn.Module
) -> dict[str, bool]:
    """The argument that selects the fused or the foreach implementation; empty for the optimizer's own choice."""
    if not isinstance(factory, type) or "fused" in values or "foreach" in values:
        return {}
    known = inspect.signature(factory).parameters
    on_accelerator = all(param.device.type != "cpu" for param in params)
    for name in ("fused", "foreach") if on_accelerator else ("fused",):
        if name in known and _can_step(factory, {**values, name: True}, params, model):
            return {name: True}
    return {}


def _can_step(
    factory: Callable[..., Optimizer], values: Mapping[str, Any], params: Iterable[Tensor], model: nn.Module
) -> bool:
    """Whether a step works on a stand-in of one element for each kind of parameter.

    Which optimizer is fused on which device, for which types and options, differs between releases of torch, and
    torch says so only in the first step.
    """
    sparse = {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    stand_ins = []
    for device, dtype, is_sparse in dict.fromkeys((param.device, param.dtype, param in sparse) for param in params):
        stand_in = torch.zeros(1, 1, device=device, dtype=dtype, requires_grad=True)
        stand_in.grad = torch.zeros_like(stand_in).to_sparse(1) if is_sparse else torch.zeros_like(stand_in)
        stand_ins.append(stand_in)
    try:
        factory(stand_ins, **values).step()
    except (RuntimeError, AssertionError):  # not ValueError: a wrong value is the caller's to report
        return False
    return True


def build_lr_scheduler(cfg: CfgNode, optimizer: Optimizer) -> LRScheduler:
    """Build the schedule ``SOLVER.LR_SCHEDULER_NAME`` with its warm-up; it keeps its last value past ``MAX_ITER``.

    ``WarmupMultiStepLR`` multiplies by ``GAMMA`` at each of ``STEPS``, ``WarmupCosineLR`` falls to ``BASE_LR_END``, and
    ``WarmupStepWithFixedGammaLR`` multiplies by ``GAMMA`` at ``NUM_DECAYS`` times that divide the training evenly.
    All lengths are in iterations; ``trainkit.config.resolve_lengths`` turns epochs into them.

    Raises:
        ConfigError: the name is unknown, or a value that the schedule uses is not accepted.
    """
    solver = cfg.SOLVER
    if solver.LR_SCHEDULER_NAME not in _SCHEDULES:
        raise _unknown("SOLVER.LR_SCHEDULER_NAME", solver.LR_SCHEDULER_NAME, "accepted", _SCHEDULES)
    max_iter = _iters("SOLVER.MAX_ITER", solver.MAX_ITER, at_least=1)
    warmup_iters = _iters("SOLVER.WARMUP_ITERS", solver.WARMUP_ITERS, at_least=0)
    if warmup_iters > max_iter:
        raise ConfigError(
            f"SOLVER.WARMUP_ITERS={warmup_iters} is longer than SOLVER.MAX_ITER={max_iter}; "
            "shorten the warm-up (0: none)"
        )
    try:
        schedule = WarmupParamScheduler(
            KeepLastValue(_SCHEDULES[solver.LR_SCHEDULER_NAME](cfg)),
            solver.WARMUP_FACTOR,
            warmup_iters / max_iter,
            solver.WARMUP_METHOD,
            solver.RESCALE_INTERVAL,
        )
    except ValueError as error:
        raise ConfigError(f"SOLVER.LR_SCHEDULER_NAME {solver.LR_SCHEDULER_NAME}: {error}") from error
    return LRMultiplier(optimizer, schedule, max_iter)


def _multi_step(cfg: CfgNode) -> ParamScheduler:
    steps = [_iters("SOLVER.STEPS", step, at_least=1) for step in cfg.SOLVER.STEPS]
    if steps != sorted(set(steps)):
        raise ConfigError(f"SOLVER.STEPS must grow from one to the next, got {tuple(steps)}")
    max_iter = cfg.SOLVER.MAX_ITER
    reached = [step for step in steps if step < max_iter]
    if reached != steps:
        _logger.warning(
            "SOLVER.STEPS %s are dropped: the training ends at SOLVER.MAX_ITER=%d, before them.",
            tuple(steps[len(reached) :]),
            max_iter,
        )
    if not reached:
        return ConstantParamScheduler(1.0)
    values = [cfg.SOLVER.GAMMA**decays for decays in range(len(reached) + 1)]
    return MultiStepParamScheduler(values, milestones=reached, num_updates=max_iter)


def _cosine(cfg: CfgNode) -> ParamScheduler:
    key, base_lr = "SOLVER.BASE_LR", cfg.SOLVER.BASE_LR
    if cfg.SOLVER.OPTIMIZER.get("LR") is not None:
        key, base_lr = f"{_NODE}.LR", cfg.SOLVER.OPTIMIZER.LR
    if not 0.0 <= cfg.SOLVER.BASE_LR_END <= base_lr or base_lr == 0:
        raise ConfigError(
            f"SOLVER.BASE_LR_END={cfg.SOLVER.BASE_LR_END} must be between 0 and {key}={base_lr}, which must not be 0"
        )
    return CosineParamScheduler(1.0, cfg.SOLVER.BASE_LR_END / base_lr)


def _fixed_gamma(cfg: CfgNode) -> ParamScheduler:
    if cfg.SOLVER.NUM_DECAYS < 1:
        raise ConfigError(f"SOLVER.NUM_DECAYS must be >= 1, got {cfg.SOLVER.NUM_DECAYS}")
    return StepWithFixedGammaParamScheduler(
        base_value=1.0, num_decays=cfg.SOLVER.NUM_DECAYS, gamma=cfg.SOLVER.GAMMA, num_updates=cfg.SOLVER.MAX_ITER
    )


_SCHEDULES: dict[str, Callable[[CfgNode], ParamScheduler]] = {
    "WarmupMultiStepLR": _multi_step,
    "WarmupCosineLR": _cosine,
    "WarmupStepWithFixedGammaLR": _fixed_gamma,
}


def _iters(key: str, value: object, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(
            f"{key} must be in iterations, an int >= {at_least}, got {value!r}; "
            "trainkit.config.resolve_lengths turns epochs into iterations"
        )
    return value


def _unknown(where: str, name: object, accepts: str, accepted: Iterable[str]) -> ConfigError:
    by_upper = {candidate.upper(): candidate for candidate in accepted}
    nearest = difflib.get_close_matches(str(name).upper(), by_upper, n=1)
    hint = f"did you mean {by_upper[nearest[0]]}? " if nearest else ""
    return ConfigError(f"{where}: unknown {name!r}; {hint}{accepts}: {', '.join(sorted(by_upper.values()))}")
