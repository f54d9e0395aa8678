"""Build an optimizer from a config."""

import contextlib
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.config.checks import check_is_ours
from trainkit.config.config import CfgNode
from trainkit.config.defaults import get_cfg
from trainkit.config.errors import ConfigError, look_up, unknown_name
from trainkit.config.imports import prepare_projects
from trainkit.config.scaling import optimizer_argument
from trainkit.solver.clipping import (  # noqa: F401  the same
    GradientClipper,
    GradientClipType,
    build_gradient_clipper,
    maybe_add_gradient_clipping,
)
from trainkit.solver.composed import build_lr_scheduler  # noqa: F401  detectron2's users find it here
from trainkit.solver.param_groups import (  # noqa: F401  the same
    _expand_param_groups,
    describe_param_groups,
    get_default_optimizer_params,
    reduce_param_groups,
)
from trainkit.utils.registry import Registry

_logger = logging.getLogger(__name__)

OPTIMIZER_REGISTRY = Registry("OPTIMIZER")
"""Classes and functions that take ``(params, **kwargs)`` and return an optimizer; preferred over ``torch.optim``."""

PARAM_GROUP_REGISTRY = Registry("PARAM_GROUP")
"""SOLVER.PARAM_GROUP_BUILDER -> a function ``(cfg, model)`` that returns the parameter groups of the optimizer."""

OPTIMIZER_BUILDER_REGISTRY = Registry("OPTIMIZER_BUILDER")
"""SOLVER.OPTIMIZER_BUILDER -> a function ``(cfg, model)`` that returns an optimizer; it may call `build_one`."""

_NODE = "SOLVER.OPTIMIZER"
_OF_SOLVER = ("MOMENTUM", "NESTEROV", "WEIGHT_DECAY", "WEIGHT_DECAY_NORM", "WEIGHT_DECAY_BIAS")


def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Build the optimizer ``SOLVER.OPTIMIZER.NAME`` over parameter groups by the rules of detectron2's keys.

    The other keys of ``SOLVER.OPTIMIZER`` are constructor arguments in upper case; None means not given. Arguments that
    are not given there come from ``SOLVER``: ``BASE_LR``, and ``MOMENTUM``, ``NESTEROV`` and ``WEIGHT_DECAY`` if the
    optimizer takes them, even at their defaults (so RMSprop gets momentum 0.9); also keys that your code has added to
    ``SOLVER``. Without ``FUSED`` or ``FOREACH``, the fused implementation is used if it works for all parameters, else,
    on an accelerator, the foreach implementation. With ``SOLVER.CLIP_GRADIENTS``, ``step()`` clips, see
    `maybe_add_gradient_clipping`.

    ``SOLVER.PARAM_GROUP_BUILDER`` and ``SOLVER.OPTIMIZER_BUILDER`` name functions that make the groups, or the whole
    optimizer, in another way. A project may set them, see `prepare_projects`.

    Raises:
        ConfigError: the optimizer, a builder or an argument is unknown, or the optimizer refuses a value; a key of
            ``SOLVER`` that the optimizer does not take is neither 0 nor at its default; the model has no trainable
            parameter.
    """
    check_is_ours(cfg)
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
    factory = _find_optimizer(cfg.SOLVER.OPTIMIZER.NAME)
    arguments = collect_arguments(cfg)
    values = {name: value for name, (_, value) in arguments.items()}
    groups = _build_groups(cfg, model, values["lr"], values.get("weight_decay"))
    if only is not None:
        groups = [{**group, "params": [param for param in group["params"] if param in only]} for group in groups]
        groups = [group for group in groups if group["params"]]
    params = [param for group in groups for param in group["params"]]
    if not params:
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameters; at least one needs requires_grad=True to be optimized"
        )
    no_matrices = {param for param in params if param.ndim != 2}
    if factory is torch.optim.Muon and no_matrices:
        names = [name for name, param in model.named_parameters() if param in no_matrices]
        raise ConfigError(
            f"{_NODE}.NAME is Muon, which updates parameters with 2 dimensions only, but {', '.join(names[:5])} "
            f"({len(names)} in all) have others; give them to another optimizer, as in docs/bring_your_model.md, "
            '"Several optimizers"'
        )
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.values())
    try:
        values |= _fastest_implementation(factory, values, params, model)
        optimizer = factory(groups, **values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{cfg.SOLVER.OPTIMIZER.NAME} refuses {given}: {error}") from error
    _logger.info(
        "Optimizer %s, implementation: %s, parameter groups: %d, parameters: %d, values: %s; %s.",
        type(optimizer).__name__,
        next((name for name in ("fused", "foreach") if values.get(name)), "default"),
        len(optimizer.param_groups),
        len(params),
        f"{sum(param.numel() for param in params):,}",
        given,
    )
    if type(optimizer) is torch.optim.SGD and optimizer.defaults["fused"]:
        optimizer.register_step_pre_hook(start_late_buffers)
    if len(optimizer.param_groups) > 1:
        _logger.info("Parameter groups:\n%s", describe_param_groups(optimizer, model))
    return optimizer


def _build_groups(cfg: CfgNode, model: nn.Module, lr: float, weight_decay: float | None) -> list[dict[str, Any]]:
    solver = cfg.SOLVER
    if not (builder := solver.PARAM_GROUP_BUILDER):
        norm, bias = (solver.WEIGHT_DECAY_NORM, solver.WEIGHT_DECAY_BIAS) if weight_decay is not None else (None, None)
        return get_default_optimizer_params(model, lr, weight_decay, norm, solver.BIAS_LR_FACTOR, bias)
    groups = look_up(PARAM_GROUP_REGISTRY, builder, "SOLVER.PARAM_GROUP_BUILDER")(cfg, model)
    try:
        return [{**group, "params": list(group["params"])} for group in groups]
    except (TypeError, KeyError) as error:
        raise TypeError(
            f"SOLVER.PARAM_GROUP_BUILDER {builder!r} must give groups, that is dicts with a list 'params', got "
            f"{groups!r}"
        ) from error


def _find_optimizer(name: str) -> Callable[..., Optimizer]:
    known: dict[str, Callable[..., Optimizer]] = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value not in (Optimizer, torch.optim.LBFGS)
    }
    if name in OPTIMIZER_REGISTRY:
        registered: Callable[..., Optimizer] = OPTIMIZER_REGISTRY.get(name)
        return registered
    if name in known:
        return known[name]
    known.update(OPTIMIZER_REGISTRY)
    if name == "LBFGS":
        raise ConfigError(
            f"{_NODE}.NAME: LBFGS evaluates the loss several times per step through a closure, which the trainers "
            "do not pass; choose another optimizer"
        )
    raise unknown_name(f"{_NODE}.NAME", name, "accepted (your own: register it, and name its module in IMPORTS)", known)


def collect_arguments(cfg: CfgNode) -> dict[str, tuple[str, Any]]:
    """argument -> (key in the config, value) for the constructor of SOLVER.OPTIMIZER; always includes ``lr``."""
    solver, factory = cfg.SOLVER, _find_optimizer(cfg.SOLVER.OPTIMIZER.NAME)
    _, *parameters = inspect.signature(factory).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = {
        parameter.name.upper(): parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    own = [key for key in solver.OPTIMIZER if key != "NAME"]
    for key in own:
        if key not in accepted and not takes_any:
            raise unknown_name(_NODE, key, f"{solver.OPTIMIZER.NAME} takes", accepted)
    arguments: dict[str, tuple[str, Any]] = {}
    for key in dict.fromkeys(["LR", *_taken_of_solver(solver, accepted, takes_any), *own]):
        full_key, value = optimizer_argument(solver, key)
        if value is None:
            continue
        if key in ("LR", "WEIGHT_DECAY") and not isinstance(value, int | float):
            raise ConfigError(f"{full_key} must be a number, got {value!r}")
        if isinstance(value, list) and key in accepted and isinstance(accepted[key].default, tuple):
            value = tuple(value)
        arguments[accepted[key].name if key in accepted else key.lower()] = full_key, value
    return arguments


def _taken_of_solver(solver: CfgNode, accepted: Collection[str], takes_any: bool) -> list[str]:
    """Raises ConfigError if a key is set that the optimizer does not take."""
    defaults = get_cfg().SOLVER
    taken = [key for key in solver if key in accepted and key not in defaults]  # the user's own code has added the key
    for key in _OF_SOLVER:
        argument = key.removesuffix("_NORM").removesuffix("_BIAS")  # _NORM and _BIAS need the argument weight_decay
        is_set = bool(solver[key]) and solver[key] != defaults[key]
        if argument in accepted or (takes_any and (is_set or argument == "WEIGHT_DECAY")):
            taken += [key] if key == argument else []
        elif is_set:
            raise ConfigError(
                f"SOLVER.{key} is {solver[key]!r}, but {solver.OPTIMIZER.NAME} takes no {argument.lower()}; leave "
                f"SOLVER.{key} at its default {defaults[key]!r}, which then has no effect, or choose another optimizer"
            )
    return taken


def _fastest_implementation(
    factory: Callable[..., Optimizer], values: Mapping[str, Any], params: list[Tensor], model: nn.Module
) -> dict[str, bool]:
    """The argument for the fused or foreach implementation; empty to let the optimizer choose."""
    if not isinstance(factory, type) or "fused" in values or "foreach" in values:
        return {}
    known = inspect.signature(factory).parameters
    on_accelerator = all(param.device.type != "cpu" for param in params)
    small = (torch.float16, torch.bfloat16)
    if factory is torch.optim.SGD and any(param.is_cpu and param.dtype in small for param in params):
        return {}  # torch 2.13 does not update most of their values (pytorch#191763)
    for name in ("fused", "foreach") if on_accelerator else ("fused",):
        if name in known:
            # ValueError is not caught: the user must see the error about a wrong value
            with contextlib.suppress(RuntimeError, AssertionError):
                _step_stand_ins(factory, {**values, name: True}, params, model)
                return {name: True}
    return {}


def start_late_buffers(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give parameters whose first gradient comes late a momentum buffer, which torch's fused SGD does not do."""
    state, groups = optimizer.state, optimizer.param_groups
    if state and len(state) < sum(len(group["params"]) for group in groups):
        for group in groups:
            if group.get("fused") and group.get("momentum"):
                late = [param for param in group["params"] if param.grad is not None and param not in state]
                state.update({param: {"momentum_buffer": torch.zeros_like(param)} for param in late})


def _step_stand_ins(
    factory: Callable[..., Optimizer], values: Mapping[str, Any], params: Iterable[Tensor], model: nn.Module
) -> None:
    """Do a step on one small tensor for each kind of parameter.

    Only the first step shows whether torch supports an implementation for a device, type and option; versions differ.
    """
    sparse = {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    stand_ins = []
    kinds = [(param.device, param.dtype, getattr(param, "device_mesh", None), param in sparse) for param in params]
    for like in dict(zip(kinds, params, strict=True)).values():
        stand_in = like.detach().new_zeros(1, 1).requires_grad_()
        stand_in.grad = torch.zeros_like(stand_in).to_sparse(1) if like in sparse else torch.zeros_like(stand_in)
        stand_ins.append(stand_in)
    factory(stand_ins, **values).step()
