"""The trainer of a step and the wrapper of the model that a config asks for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainkit.config import CfgNode
from trainkit.engine.amp import AMPTrainer, fixed_scaler
from trainkit.engine.parallel import check_own_device
from trainkit.engine.policies import POLICIES, NonFinitePolicy
from trainkit.engine.step import SimpleTrainer
from trainkit.solver.build import build_gradient_clipper
from trainkit.utils.device import device_of, runs_ahead
from trainkit.utils.errors import look_up, unknown_name
from trainkit.utils.registry import Registry

TRAINER_REGISTRY = Registry("TRAINER")
"""SOLVER.TRAINER -> a function ``(cfg, model, data_loader, optimizer)`` that returns a
`SimpleTrainer`."""

POLICY_REGISTRY = Registry("POLICY")
"""SOLVER.NON_FINITE.POLICY, except those of `POLICIES` -> a function ``(max_in_row)`` that returns
a policy."""

WRAPPER_REGISTRY = Registry("WRAPPER")
"""MODEL.PARALLEL -> a function ``(cfg, build)`` that returns the model of several processes.

"ddp" is not in it. ``build(cfg)``, a `ModelBuilder`, returns the model of one process. The
optimizer is built for the wrapped model.
"""


@dataclass(frozen=True)
class ModelBuilder:
    """Builds the model of one process by ``build``."""

    build: Callable[[CfgNode], nn.Module]
    # a `DefaultTrainer`, or its class under ``--eval-only``; a wrapper may call its methods
    trainer: Any

    def __call__(self, cfg: CfgNode) -> nn.Module:
        return self.build(cfg)


def build_parallel(cfg: CfgNode, build: ModelBuilder) -> nn.Module:
    """The model by MODEL.PARALLEL; with "ddp" that of one process.

    Raises:
        ConfigError: MODEL.PARALLEL is not registered; two ranks are on one accelerator.
    """
    if cfg.MODEL.PARALLEL == "ddp":
        model = build(cfg)
    else:
        wrap = look_up(WRAPPER_REGISTRY, cfg.MODEL.PARALLEL, "MODEL.PARALLEL")
        model = wrap(cfg, build)
    check_own_device(model)
    return model


def ddp_options(cfg: CfgNode) -> dict[str, Any]:
    """MODEL.DDP as arguments of `create_ddp_model`."""
    options: dict[str, Any] = {key.lower(): value for key, value in cfg.MODEL.DDP.items()}
    compression = options.pop("compression")
    options["fp16_compression"] = compression == "fp16"
    options["bf16_compression"] = compression == "bf16"
    return options


def make_step_trainer(
    cfg: CfgNode,
    model: nn.Module,
    data_loader: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    plain: type[SimpleTrainer] = SimpleTrainer,
    mixed: type[AMPTrainer] = AMPTrainer,
    **kwargs: Any,
) -> SimpleTrainer:
    """A trainer with the arguments that ``cfg`` gives, and ``kwargs``.

    Args:
        plain: the class without SOLVER.AMP.
        mixed: the class with SOLVER.AMP.
    """
    device = device_of(model) or torch.device("cpu")
    async_write_metrics = cfg.LOG.ASYNC
    if async_write_metrics is None:
        async_write_metrics = runs_ahead(device)
    clipper = getattr(optimizer, "gradient_clipper", None)  # of maybe_add_gradient_clipping
    if clipper is None:
        clipper = build_gradient_clipper(cfg)
    arguments: dict[str, Any] = {
        "gather_metric_period": cfg.LOG.GATHER_PERIOD,
        "zero_grad_before_forward": cfg.SOLVER.ZERO_GRAD_BEFORE_FORWARD,
        "async_write_metrics": async_write_metrics,
        "accumulation_steps": cfg.SOLVER.ACCUMULATION_STEPS,
        "clip_gradients": clipper,
        "non_finite": _build_policy(cfg),
        **kwargs,
    }
    amp = cfg.SOLVER.AMP
    if not amp.ENABLED:
        return plain(model, data_loader, optimizer, **arguments)
    precision = {"float16": torch.float16, "bfloat16": torch.bfloat16}[amp.PRECISION]
    arguments["precision"] = precision
    arguments["log_grad_scaler"] = True
    if amp.LOSS_SCALE != "dynamic":
        arguments["grad_scaler"] = fixed_scaler(device.type, amp.LOSS_SCALE)
    elif precision == torch.float16:
        arguments["grad_scaler"] = torch.amp.GradScaler(device.type, init_scale=amp.INIT_SCALE)
    return mixed(model, data_loader, optimizer, **arguments)


def _build_policy(cfg: CfgNode) -> NonFinitePolicy:
    name = cfg.SOLVER.NON_FINITE.POLICY
    max_in_row = cfg.SOLVER.NON_FINITE.MAX_IN_ROW
    if name in POLICIES:
        return POLICIES[name](max_in_row)
    if name not in POLICY_REGISTRY:
        known = [*POLICIES, *(registered for registered, _ in POLICY_REGISTRY)]
        raise unknown_name("SOLVER.NON_FINITE.POLICY", name, "accepted", known)
    build: Callable[[int], NonFinitePolicy] = POLICY_REGISTRY.get(name)
    return build(max_in_row)
