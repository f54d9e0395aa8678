"""Several optimizers as one, each for a part of the parameters; and layer-wise adaptive rate scaling."""

import fnmatch
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.config import CfgNode, ConfigError
from trainkit.solver.build import (
    OPTIMIZER_BUILDER_REGISTRY,
    OPTIMIZER_REGISTRY,
    build_one,
    with_optimizer,
)
from trainkit.utils.errors import not_accepted
from trainkit.utils.periods import check_number
from trainkit.utils.registry import did_you_mean

_logger = logging.getLogger(__name__)


class CombinedOptimizer(Optimizer):
    """Optimizers that step together, in the given order.

    ``param_groups`` are those of all optimizers, and ``state`` is one state for all, so schedules, clipping, gradient
    scalers and checkpoints use it like a single optimizer. A gradient scaler treats it as fused if all optimizers are
    fused. All that changes in an optimizer must be in its ``state`` and ``param_groups``, as in torch's. Raises
    ValueError: a parameter belongs to two optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        groups: list[dict[str, Any]] = []
        for optimizer in optimizers:
            groups += optimizer.param_groups
        super().__init__(groups, {})
        self.optimizers = list(optimizers)
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self.__setstate__({})

    @property
    def _step_supports_amp_scaling(self) -> bool:
        name = "_step_supports_amp_scaling"
        return all(getattr(optimizer, name, False) for optimizer in self.optimizers)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure`` is called once."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for optimizer in self.optimizers:
            # tensors of a scaler, which fused optimizers read
            part: Any = optimizer
            part.grad_scale = getattr(self, "grad_scale", None)
            part.found_inf = getattr(self, "found_inf", None)
            optimizer.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the constructor. Later it raises TypeError, since the optimizer of the group would not be known."""
        if hasattr(self, "optimizers"):
            raise TypeError(
                "a CombinedOptimizer takes no further group; build it from optimizers that "
                "have the group"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let the optimizers use this state and these groups; ``load_state_dict`` calls this with new ones."""
        super().__setstate__(state)
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            own = [*islice(groups, len(optimizer.param_groups))]
            optimizer.__setstate__({"state": self.state, "param_groups": own})


@OPTIMIZER_BUILDER_REGISTRY.register()
def combined_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """The optimizers of SOLVER.OPTIMIZERS as one; each entry is like SOLVER.OPTIMIZER, and has its PARAMS.

    A parameter belongs to the first entry with a pattern that fits its name. Raises ConfigError: an entry is wrong, see
    also `build_one`; a pattern fits no parameter that is left; a parameter fits no pattern.
    """
    _logger.info("SOLVER.OPTIMIZERS is used; SOLVER.OPTIMIZER has no effect")
    left = {name: param for name, param in model.named_parameters() if param.requires_grad}
    parts = []
    for entry in cfg.SOLVER.OPTIMIZERS:
        node = dict(entry) if isinstance(entry, Mapping) else {}
        patterns = node.pop("PARAMS", ["*"])
        name = node.get("NAME")
        if not isinstance(patterns, list | tuple) or not patterns or not isinstance(name, str):
            accepted = 'nodes with NAME, arguments, and PARAMS, a list such as ["*.weight"] (without it: all others)'
            raise not_accepted("SOLVER.OPTIMIZERS", entry, accepted)
        params: set[Tensor] = set()
        for pattern in patterns:
            fitting = fnmatch.filter(left, pattern)
            if not fitting:
                reason = f"{pattern!r} (PARAMS of {name}) fits no trainable parameter that is left"
                raise ConfigError(f"SOLVER.OPTIMIZERS: {did_you_mean(pattern, left)}{reason}")
            for fitting_name in fitting:
                params.add(left.pop(fitting_name))
        try:
            parts.append(build_one(with_optimizer(cfg, node), model, params))
        except ConfigError as error:
            raise ConfigError(f"SOLVER.OPTIMIZERS, entry of {name}: {error}") from error
    if left:
        raise ConfigError(
            f"SOLVER.OPTIMIZERS: no PARAMS fit {', '.join([*left][:5])} ({len(left)} in all)"
        )
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


@OPTIMIZER_REGISTRY.register()
class LARS(Optimizer):
    """SGD with a learning rate per parameter, scaled by the norms of the parameter and its gradient.

    You et al., "Large Batch Training of Convolutional Networks". For each parameter ``w`` with gradient ``g``::

        local = eta * |w| / (|g| + weight_decay * |w| + eps)  # 1 if |w| or |g| is 0, or the group is excluded
        update = lr * local * (g + weight_decay * w)
        buffer = update at first, later momentum * buffer + (1 - dampening) * update
        w -= update + momentum * buffer if nesterov else buffer

    The learning rate is inside the buffer, unlike in ``torch.optim.SGD``. Groups with ``lars_exclude: True`` have no
    local rate, but keep their weight decay. Norms are computed in float32, or in float64 for float64 parameters. A step
    does not wait for the device. There is no fused version, so a ``GradScaler`` waits for the device once per step to
    decide whether to skip the step.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        eta: float = 0.001,
        nesterov: bool = False,
        eps: float = 1e-8,
        lars_exclude: bool = False,
    ) -> None:
        if not isinstance(lr, Tensor):
            check_number("lr", lr, "[0, inf)")
        numbers = {
            "momentum": momentum,
            "weight_decay": weight_decay,
            "dampening": dampening,
            "eta": eta,
            "eps": eps,
        }
        for name, value in numbers.items():
            check_number(name, value, "[0, inf)")
        defaults = {"lr": lr, **numbers, "nesterov": nesterov, "lars_exclude": lars_exclude}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient, which must not be sparse."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            # tensors of one foreach call
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    alike.setdefault((param.device, param.dtype), []).append(param)
            for params in alike.values():
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        updates = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        rates = group["lr"]
        if not group["lars_exclude"]:
            rates = _rates(params, grads, group)
        torch._foreach_mul_(updates, rates)
        momentum = group["momentum"]
        if momentum != 0:
            buffers = self._accumulate(params, updates, group)
            if group["nesterov"]:
                updates = list(torch._foreach_add(updates, buffers, alpha=momentum))
            else:
                updates = buffers
        torch._foreach_sub_(params, updates)

    def _accumulate(
        self, params: list[Tensor], updates: list[Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        states = [self.state[param] for param in params]
        buffers: list[Tensor] = []
        added: list[Tensor] = []
        for state, update in zip(states, updates, strict=True):
            if "momentum_buffer" in state:
                buffers.append(state["momentum_buffer"])
                added.append(update)
        if buffers:
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, added, alpha=1 - group["dampening"])
        for state, update in zip(states, updates, strict=True):
            state.setdefault("momentum_buffer", update)  # at first the update itself
        return [state["momentum_buffer"] for state in states]


def _rates(params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    param_norms = _norms(params)
    grad_norms = _norms(grads)
    decay = group["weight_decay"] * param_norms
    local = group["eta"] * param_norms / (grad_norms + decay + group["eps"])
    local = local.where((param_norms > 0) & (grad_norms > 0), 1.0)
    return list((local * group["lr"]).unbind())


def _norms(tensors: list[Tensor]) -> Any:
    """The norm of each tensor, over all ranks that hold parts of it."""
    # in float16, the norm of many small values overflows
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    # cast before the norm: for sharded tensors, torch 2.15 mistakes the norm's argument dtype for a dimension
    norms: Any = torch.stack(torch._foreach_norm([tensor.to(dtype) for tensor in tensors]))
    return norms.full_tensor() if hasattr(norms, "full_tensor") else norms
