"""One optimization step in mixed precision."""

import logging
import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainkit.engine.finite import prepare_to_skip
from trainkit.engine.metrics import SCALE
from trainkit.engine.step import SimpleTrainer
from trainkit.utils.losses import Losses

logger = logging.getLogger(__name__)


class AMPTrainer(SimpleTrainer):
    """`SimpleTrainer` in mixed precision: the forward pass under autocast; float16 with a gradient scaler.

    Parameters, gradients and the optimizer's state stay in float32. bfloat16 has the range of float32 and needs no
    scaler. If gradients are not finite, because of an overflow or ``after_backward``, the scaler skips the update;
    ``skipped_updates`` in the storage counts these. Schedules are functions of the iteration, so skipping does not
    delay them.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        gather_metric_period: int = 1,
        zero_grad_before_forward: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        precision: torch.dtype = torch.float16,
        log_grad_scaler: bool = False,
        async_write_metrics: bool = False,
        *,
        loss_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            grad_scaler: default is a dynamic one for float16 and none for bfloat16.
            precision: ``torch.float16`` or ``torch.bfloat16``.
            log_grad_scaler: store the scale of each iteration as ``[metric]grad_scaler``.
            loss_scale: for float16, a fixed scale instead of a dynamic one; not saved in the state.
            kwargs: as in `SimpleTrainer`.

        Raises:
            ValueError: another precision; a ``loss_scale`` that is not greater than 0, or together with a scaler or
                bfloat16; a model on several devices of one process; fused SGD with dampening under a scaler.
        """
        super().__init__(
            model, data_loader, optimizer, gather_metric_period, zero_grad_before_forward, async_write_metrics, **kwargs
        )
        if precision not in (torch.float16, torch.bfloat16):
            raise ValueError(f"precision must be torch.float16 or torch.bfloat16, got {precision}")
        if isinstance(model, nn.DataParallel) or len(getattr(model, "device_ids", None) or ()) > 1:
            raise ValueError("AMPTrainer needs one device per process; use create_ddp_model instead of DataParallel")
        self._device_type = self._device.type
        self.precision, self.log_grad_scaler, self._loss_scale = precision, log_grad_scaler, loss_scale
        if loss_scale is not None:
            if grad_scaler is not None or precision != torch.float16 or not 0 < loss_scale < math.inf:
                raise ValueError(
                    "loss_scale must be a number greater than 0, for float16 and without a grad_scaler, got "
                    f"{loss_scale!r} with {precision} and grad_scaler={grad_scaler!r}; leave it out for a dynamic scale"
                )
            grad_scaler = torch.amp.GradScaler(self._device_type, init_scale=loss_scale)
            grad_scaler.set_growth_factor(1.0)
            grad_scaler.set_backoff_factor(1.0)
        self.grad_scaler = grad_scaler or torch.amp.GradScaler(self._device_type, enabled=precision == torch.float16)
        self._unscaled = False
        self.finite.scaled = self.grad_scaler.is_enabled()
        if self.finite.scaled and self.non_finite != "skip":
            prepare_to_skip(optimizer, self._device_type)

    def compute_losses(self, batch: Any) -> Losses:
        with torch.autocast(self._device_type, dtype=self.precision):
            return super().compute_losses(batch)

    def backward(self, loss: Tensor) -> None:
        self.grad_scaler.scale(loss).backward()

    def prepare_gradients(self) -> None:
        scaler = self.grad_scaler
        if scaler.is_enabled():
            if self._unscaled:  # the last step failed after this point; reset the scaler
                scaler.update(scaler.get_scale())
            self._unscaled = True
            scaler.unscale_(self.optimizer)
            self.finite.has_looked = not self.acts_after_backward()
            # step() reads these tensors to decide whether to update; the public API would wait for the device
            self.finite.flags = cast(dict[torch.device, Tensor], scaler._found_inf_per_device(self.optimizer))

    def judge_gradients(self, losses: Losses) -> dict[str, Tensor]:
        extra = super().judge_gradients(losses)
        if self.log_grad_scaler and self.finite.scaled:
            extra[SCALE] = cast(Tensor, self.grad_scaler._get_scale_async())
        return extra

    def update(self) -> None:
        if not self.grad_scaler.is_enabled():
            super().update()
            return
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self._unscaled = False

    def step_state_dict(self) -> dict[str, Any]:
        """The state of the step, with the scale unless it is fixed."""
        scaler = self.grad_scaler.state_dict() if self._loss_scale is None else {}
        return {**super().step_state_dict(), "grad_scaler": scaler}

    def load_step_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_step_state_dict(state_dict)
        if not self.grad_scaler.is_enabled() or self._loss_scale is not None:
            return
        if state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        else:
            logger.warning("The checkpoint has no gradient scale; it starts from %g", self.grad_scaler.get_scale())
