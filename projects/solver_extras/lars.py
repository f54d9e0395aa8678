"""Layer-wise adaptive rate scaling."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.solver.build import OPTIMIZER_REGISTRY


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
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dampening": dampening, "eta": eta}
        super().__init__(params, {**defaults, "nesterov": nesterov, "eps": eps, "lars_exclude": lars_exclude})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient, which must not be sparse."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}  # tensors of one foreach call
            for param in group["params"]:
                if param.grad is not None:
                    alike.setdefault((param.device, param.dtype), []).append(param)
            for params in alike.values():
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        updates = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        torch._foreach_mul_(updates, group["lr"] if group["lars_exclude"] else _rates(params, grads, group))
        if group["momentum"] != 0:
            buffers = self._accumulate(params, updates, group)
            is_nesterov, momentum = group["nesterov"], group["momentum"]
            updates = list(torch._foreach_add(updates, buffers, alpha=momentum)) if is_nesterov else buffers
        torch._foreach_sub_(params, updates)

    def _accumulate(self, params: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Add the updates to the momentum buffers, and return the buffers."""
        states = [self.state[param] for param in params]
        later = [index for index, state in enumerate(states) if "momentum_buffer" in state]
        if later:
            buffers = [states[index]["momentum_buffer"] for index in later]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, [updates[index] for index in later], alpha=1 - group["dampening"])
        return [state.setdefault("momentum_buffer", update) for state, update in zip(states, updates, strict=True)]


def _rates(params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """The learning rate of each parameter, shape ``[]``."""
    dtype = torch.promote_types(params[0].dtype, torch.float32)  # in float16, the norm of many small values overflows
    # cast before the norm: for sharded tensors, torch 2.15 mistakes the norm's argument dtype for a dimension
    both: Any = (torch.stack(torch._foreach_norm([tensor.to(dtype) for tensor in part])) for part in (params, grads))
    # the norms over all ranks that hold parts of the tensors
    param_norms, grad_norms = (norms.full_tensor() if hasattr(norms, "full_tensor") else norms for norms in both)
    local = group["eta"] * param_norms / (grad_norms + group["weight_decay"] * param_norms + group["eps"])
    local = local.where((param_norms > 0) & (grad_norms > 0), 1.0)
    return list((local * group["lr"]).unbind())
