"""Losses and gradients that are not finite: flagged on the device without waiting, handled on the host."""

import logging
import math
import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.config import ConfigError
from trainkit.utils import comm
from trainkit.utils.periods import check_period

logger = logging.getLogger(__name__)

NonFinitePolicy: TypeAlias = Literal["raise", "skip", "ignore"]


class FiniteCheck:
    """Finds updates that are not finite, and applies ``policy``; part of the trainer's state.

    On the device, `flag_update` sets a flag in each iteration. On the host, `look` gets the flag and the losses in the
    order of the iterations, possibly later and in another thread.

    Attributes:
        flag: float32, shape ``[]``, on the device: 1 if the update of this iteration is not finite. None under
            "ignore".
        flags: device -> flag. A gradient scaler puts its own flags here, and reads them to decide whether to update.
        scaled: whether there is a gradient scaler.
        has_looked: whether the scaler has checked this iteration's gradients, and no hook has changed them since.
        skipped: number of skipped updates.
        in_row: number of skipped updates in a row, up to the last one.
    """

    def __init__(self, policy: NonFinitePolicy, max_in_row: int) -> None:
        """
        Args:
            max_in_row: this number of skipped updates in a row is a failure.

        Raises:
            ValueError: the policy is unknown, or ``max_in_row`` less than 1.
        """
        if policy not in (policies := get_args(NonFinitePolicy)):
            raise ValueError(f"non_finite must be one of {', '.join(policies)}, got {policy!r}")
        self.policy = policy
        self._max_in_row = check_period("max_non_finite_in_row", max_in_row, minimum=1)
        self.scaled = self.has_looked = False
        self.skipped = self.in_row = 0
        self._parameters: list[Tensor] = []
        self._groups: list[tuple[torch.device, list[Tensor]]] = []  # parameters by device, dtype and kind
        self._former_buffers: dict[str, Tensor] = {}  # restored after a skipped step
        self._never_finite: set[str] = set()  # parts of the model, such as masks of -inf
        self.reset()

    @property
    def skips(self) -> bool:
        """Whether flagged updates are skipped, by the policy or by a gradient scaler."""
        return self.scaled or self.policy == "skip"

    def reset(self) -> None:
        """Forget the results of a failed run."""
        self.flag: Tensor | None = None
        self.flags: dict[torch.device, Tensor] = {}

    def watch(self, model: nn.Module) -> None:
        """Accept values of the model that are not finite now; waits for the device."""
        self._never_finite = set() if self.policy == "ignore" else {*non_finite_names(model)}

    # ------------------------------------------------------------------ on the device

    def keep_buffers(self, model: nn.Module) -> None:
        """Copy the buffers before a forward pass: the pass changes them even if the update is skipped."""
        if self.policy == "skip":
            self._former_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            self.flags = {}

    def flag_update(self, model: nn.Module, optimizer: torch.optim.Optimizer, total: Tensor) -> Tensor | None:
        """Set and return ``flag``; under "skip" it also covers the loss and is equal on all ranks. Does not wait."""
        if self.policy != "ignore" and not self.has_looked:
            self._mark_gradients(model, optimizer)
        if comm.get_data_group_size() > 1:  # torch shares a flag only among the ranks that hold a gradient
            for flag in self.flags.values():
                dist.all_reduce(flag, dist.ReduceOp.MAX)
        if self.policy != "skip":
            self.flag = _join(self.flags, total.device) if self.flags else None
            return self.flag
        self.flag = flag = _join(self.flags, total.device)
        _mark([_as_plain(total)], flag)
        if comm.get_world_size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        if self._former_buffers:
            skipped = flag.bool()
            for name, buffer in model.named_buffers():
                if name in self._former_buffers:  # False: this forward pass has created the buffer
                    torch.where(skipped.to(buffer.device), self._former_buffers[name], buffer, out=buffer)
            self._former_buffers = {}
        return flag

    def _mark_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Set the flag of each device that has a gradient which is not finite; flags of shards agree on all ranks."""
        parameters = parameters_of(optimizer, model)
        # comparing the parameters with those of the last step is faster than reading their devices
        if len(parameters) != len(self._parameters) or not all(map(operator.is_, parameters, self._parameters)):
            groups: dict[tuple[Any, ...], list[Tensor]] = {}
            for parameter in parameters:
                groups.setdefault((parameter.device, parameter.dtype, type(parameter)), []).append(parameter)
            self._parameters, self._groups = parameters, [(device, group) for (device, *_), group in groups.items()]
        for device, group in self._groups:
            if grads := [grad for parameter in group if (grad := parameter.grad) is not None]:
                flag = self.flags.get(device)
                if flag is None:
                    flag = self.flags[device] = _zero(device)
                try:
                    _mark(grads, flag)
                except RuntimeError:  # some gradients are not plain tensors
                    for grad in grads:
                        _mark([_as_plain(grad)], flag)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()``; under "skip" only if the flag is 0. Only optimizers that are not fused wait for the
        flag."""
        if self.policy != "skip" or self.flag is None:
            optimizer.step()
        elif not _skips_on_device(optimizer):
            if not self.flag.item():
                optimizer.step()
        else:
            optimizer.grad_scale, optimizer.found_inf = None, self.flag  # type: ignore[attr-defined]  # as GradScaler
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ on the host

    def look(self, iter: int, losses: Mapping[str, float], flagged: bool) -> str | None:
        """Count skipped updates.

        Args:
            losses: this rank's losses by name, with the total and other stored values of the iteration.

        Returns:
            A description of the failure, if it is one; not raised here, since all ranks must raise it together.
        """
        bad_loss = not math.isfinite(losses["total_loss"])
        if not (flagged or bad_loss):
            self.in_row = 0
            return None
        skipped = flagged and self.skips
        self.skipped += skipped
        self.in_row = self.in_row + 1 if skipped else 0
        if self.policy == "ignore":
            return None
        what = "loss is" if bad_loss else "gradients are"
        if not skipped:
            self.flags = {}  # otherwise the flags would stay 1
            return describe_failure(what, iter, losses)
        if self.in_row >= self._max_in_row:
            return describe_failure(what, iter, losses, f"; this is update {self.in_row} in a row that is skipped")
        if bad_loss or not self.scaled:  # a scaler skips regularly, to find the largest possible scale
            logger.warning("The update of iteration %d is skipped: the %s not finite", iter, what)
        return None

    def describe_model(self, model: nn.Module, iter: int) -> str | None:
        """Values of the model on this rank that are not finite, although losses and gradients were finite.

        Waits for the device. None if all values are finite.
        """
        if self.policy == "ignore":
            return None
        names = [name for name in non_finite_names(model) if name not in self._never_finite]
        if not names:
            return None
        return (
            f"the model is not finite in iteration {iter}, though its losses and gradients were: "
            f"{', '.join(names[:5])} ({len(names)} in all). Lower the learning rate, or look at what goes into them"
        )

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_row": self.in_row}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.skipped, self.in_row = state_dict.get("skipped", 0), state_dict.get("in_row", 0)


def parameters_of(optimizer: Any, model: nn.Module) -> list[Tensor]:
    """The parameters of the optimizer, in its order; those of the model if the optimizer has no ``param_groups``."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return [*model.parameters()]
    return [parameter for group in groups for parameter in group["params"]]


def _mark(tensors: list[Tensor], flag: Tensor) -> None:
    """Set the flag to 1 if a value is not finite."""
    # the kernel of GradScaler.unscale_; a scale of 1 does not change the values
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, _one(flag.device))


def _as_plain(grad: Tensor) -> Tensor:
    grad = grad.detach()  # a gradient may have a graph
    if grad.is_sparse:
        grad = grad._values()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=device)  # as kernels expect it, also under another default dtype


def _join(flags: dict[torch.device, Tensor], device: torch.device) -> Tensor:
    """Merge into one flag on ``device``: a GradScaler adds flags up, and fused optimizers skip at exactly 1."""
    joined = flags.get(device)
    if joined is None or len(flags) != 1:
        on_one = [flag.to(device, non_blocking=True) for flag in flags.values()]
        flags.clear()
        joined = flags[device] = torch.stack(on_one).amax() if on_one else _zero(device)
    return joined


def prepare_to_skip(optimizer: torch.optim.Optimizer, device_type: str) -> None:
    """Log if updates wait for the device, and prepare fused SGD for skipping its very first update.

    If fused SGD skips its first update, its momentum stays uninitialised, so it is set to zeros here. With dampening 0
    the first update from zeros equals the usual one: ``momentum * 0 + grad``.

    Raises:
        ConfigError: fused SGD with dampening.
    """
    if not _skips_on_device(optimizer):  # then step() is simply not called
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
    """Names of parameters and buffers with a value that is not finite on this rank; waits for the device."""
    finite: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        finite.setdefault(local.device, {})[name] = local.isfinite().all()
    return [
        name
        for by_name in finite.values()
        for name, good in zip(by_name, torch.stack([*by_name.values()]).tolist(), strict=True)  # reads each device once
        if not good
    ]


def describe_failure(what: str, iter: int, losses: Mapping[str, float], more: str = "") -> str:
    return (
        f"the {what} not finite in iteration {iter}: {losses}{more}. Lower the learning rate, clip gradients, or look "
        "at the batch of this iteration; the weights have not been updated with it, unless metrics are asynchronous or "
        "those of several ranks are not gathered in each iteration"
    )


def raise_failure(by_rank: Sequence[str | None]) -> None:
    """Raise the first failure, if there is one; every rank passes the same list.

    Raises:
        FloatingPointError: a rank has a failure; with several ranks the message names it.
    """
    for rank, failure in enumerate(by_rank):
        if failure is not None:
            raise FloatingPointError(failure if len(by_rank) == 1 else f"{failure} (on rank {rank})")
