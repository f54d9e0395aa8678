"""Losses and gradients that are not finite: found on the device without waiting for it, judged on the host."""

import logging
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.config import ConfigError

logger = logging.getLogger(__name__)

NonFinitePolicy: TypeAlias = Literal["raise", "skip", "ignore"]


# ---------------------------------------------------------------------- on the device


class GradientCheck:
    """Looks at all gradients of an optimizer, in one call per device and dtype."""

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._groups: list[tuple[torch.device, list[Tensor]]] = []  # the same, by device, dtype and kind

    def mark_non_finite(self, optimizer: torch.optim.Optimizer, flags: dict[torch.device, Tensor]) -> None:
        """Set a flag to 1 where a gradient on its device is not finite; flags that are missing are made.

        Args:
            flags: each float32, shape ``[]``. Those of sharded gradients are the same on all ranks.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # to look at the device of each takes longer than to see that they are the same as in the last step
        if len(parameters) != len(self._parameters) or not all(map(operator.is_, parameters, self._parameters)):
            self._parameters, self._groups = parameters, _by_kind(parameters)
        for device, group in self._groups:
            grads = [grad for parameter in group if (grad := parameter.grad) is not None]
            if grads:
                flag = flags.get(device)
                if flag is None:
                    flag = flags[device] = torch.zeros((), device=device)
                # the kernel of GradScaler.unscale_; with a scale of 1 the values stay as they are
                mark = torch._amp_foreach_non_finite_check_and_unscale_
                try:
                    mark(grads, flag, _one(device))
                except RuntimeError:  # not all of them are plain tensors
                    for grad in grads:
                        mark([_as_plain(grad)], flag, _one(device))


def _by_kind(parameters: Iterable[Tensor]) -> list[tuple[torch.device, list[Tensor]]]:
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.device, parameter.dtype, type(parameter)), []).append(parameter)
    return [(device, group) for (device, *_), group in groups.items()]


def _as_plain(grad: Tensor) -> Tensor:
    grad = grad.detach()  # it may have a graph of its own
    if grad.is_sparse:
        grad = grad._values()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def join_flags(flags: dict[torch.device, Tensor], device: torch.device) -> Tensor:
    """Leave one flag, on ``device``: a GradScaler adds them up, and fused optimizers skip at exactly 1."""
    joined = flags.get(device)
    if joined is None or len(flags) != 1:
        on_one = [flag.to(device, non_blocking=True) for flag in flags.values()]
        flags.clear()
        joined = flags[device] = torch.stack(on_one).amax() if on_one else torch.zeros((), device=device)
    return joined


def step_unless(flag: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()`` unless ``flag`` is 1; only optimizers that are not fused wait for the device."""
    if not _skips_on_device(optimizer):
        if not flag.item():
            optimizer.step()
        return
    optimizer.grad_scale, optimizer.found_inf = None, flag  # type: ignore[attr-defined]  # as GradScaler.step does
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def prepare_to_skip(optimizer: torch.optim.Optimizer, device_type: str) -> None:
    """Say it if updates wait for the device, and let fused SGD skip its very first update.

    Fused SGD leaves its momentum uninitialised then; zeros are what it means. With dampening 0 the first update from
    zeros equals the usual one: ``momentum * 0 + grad``.

    Raises:
        ConfigError: fused SGD with dampening.
    """
    if not _skips_on_device(optimizer):  # its step() is not even called
        if device_type != "cpu":
            logger.warning(
                "%s has no fused implementation here, so under float16, or if updates that are not finite are skipped, "
                "every update waits for the device to learn whether to skip it; SGD, Adam, AdamW and Adagrad with "
                "fused=True do not",
                type(optimizer).__name__,
            )
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group.get("momentum"):
            if group.get("dampening"):
                raise ConfigError(
                    "fused SGD with dampening cannot skip its first update, as a scaler or SOLVER.NON_FINITE.POLICY "
                    "skip may ask; set fused=False (in the config: SOLVER.OPTIMIZER.FUSED)"
                )
            for parameter in group["params"]:
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer, "_step_supports_amp_scaling", False)


@torch.no_grad()
def non_finite_names(model: nn.Module) -> list[str]:
    """The parameters and buffers, by name, that hold something not finite on this rank; waits for the device."""
    found = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.append((name, local.isfinite().all()))
    return [name for name, finite in found if not finite.item()]


# ---------------------------------------------------------------------- on the host


def describe_failure(what: str, iter: int, losses: Mapping[str, float], more: str = "") -> str:
    return (
        f"the {what} not finite in iteration {iter}: {losses}{more}. Lower the learning rate, clip gradients, or look "
        "at the batch of this iteration; the weights have not been updated with it, unless metrics are asynchronous or "
        "those of several ranks are not gathered in each iteration"
    )


def raise_failure(by_rank: Sequence[str | None]) -> None:
    """Raise the first failure, if there is one; every rank passes the same.

    Raises:
        FloatingPointError: with the rank, if there are several.
    """
    for rank, failure in enumerate(by_rank):
        if failure is not None:
            raise FloatingPointError(failure if len(by_rank) == 1 else f"{failure} (on rank {rank})")


class FiniteJudge:
    """What the iterations' losses and flags mean, in the order of the iterations; part of the trainer's state.

    Attributes:
        policy: what to do if an iteration is not finite.
        skips: whether an update that is flagged is left out, by the policy or by a gradient scaler.
        in_row: how many the last updates have been left out.
        skipped: how many updates have been left out.
    """

    def __init__(self, policy: NonFinitePolicy, max_in_row: int) -> None:
        """
        Raises:
            ValueError: the policy is unknown.
        """
        if policy not in (policies := get_args(NonFinitePolicy)):
            raise ValueError(f"non_finite must be one of {', '.join(policies)}, got {policy!r}")
        self.policy, self._max_in_row = policy, max_in_row
        self._failure: str | None = None
        self.scaled = False
        self.in_row = self.skipped = 0

    @property
    def skips(self) -> bool:
        return self.scaled or self.policy == "skip"

    def look(self, iter: int, losses: Mapping[str, float], flagged: bool) -> None:
        """Count, and remember the first failure until `take_failure`: a rank must not raise alone.

        Args:
            losses: those of this rank by name, the total among them, and what else is stored of the iteration.
            flagged: whether the gradients are not finite, or what else has the update left out.
        """
        bad_loss = not math.isfinite(losses["total_loss"])
        if not (flagged or bad_loss):
            self.in_row = 0
            return
        skipped = flagged and self.skips
        self.skipped += skipped
        self.in_row = self.in_row + 1 if skipped else 0
        if self.policy == "ignore":
            return
        what = "loss is" if bad_loss else "gradients are"
        if not skipped:
            self._failure = self._failure or describe_failure(what, iter, losses)
        elif self.in_row >= self._max_in_row:
            more = f"; this is update {self.in_row} in a row that is skipped"
            self._failure = self._failure or describe_failure(what, iter, losses, more)
        elif bad_loss or not self.scaled:  # a scaler tries now and then how far it can go
            logger.warning("The update of iteration %d is skipped: the %s not finite", iter, what)

    def take_failure(self) -> str | None:
        """The first failure since the last call."""
        failure, self._failure = self._failure, None
        return failure

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_row": self.in_row}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.skipped, self.in_row = state_dict.get("skipped", 0), state_dict.get("in_row", 0)
