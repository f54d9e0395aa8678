"""One optimization step in mixed precision."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.engine.losses import Losses
from trainkit.engine.policies import SKIP_FLAG, skips_on_device
from trainkit.engine.step import SimpleTrainer
from trainkit.solver.param_groups import start_momentum
from trainkit.utils import comm
from trainkit.utils.events.storage import EventStorage

logger = logging.getLogger(__name__)

SCALE = "[metric]grad_scaler"  # stored in each iteration, as in detectron2
_SCALE_FLAG = "[flag]scale"


class AMPTrainer(SimpleTrainer):
    """`SimpleTrainer` in mixed precision: the forward pass is under autocast.

    Parameters, gradients and the optimizer's state stay in float32. float16 has a gradient scaler;
    bfloat16 has the range of float32 and needs none. If gradients are not finite, because of an
    overflow or ``after_backward``, the scaler skips the update; ``skipped_updates`` in the storage
    counts these. Schedules are functions of the iteration, so skipping does not delay them.
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
        **kwargs: Any,
    ) -> None:
        """A `SimpleTrainer` with a gradient scaler.

        Args:
            grad_scaler: default is a dynamic one for float16 and none for bfloat16; see
                `fixed_scaler`.
            precision: ``torch.float16`` or ``torch.bfloat16``.
            log_grad_scaler: store the scale of each iteration as ``[metric]grad_scaler``.
            kwargs: as in `SimpleTrainer`.

        Raises:
            ValueError: another precision; a model on several devices of one process.
            ConfigError: fused SGD with dampening under a scaler.
        """
        super().__init__(
            model,
            data_loader,
            optimizer,
            gather_metric_period,
            zero_grad_before_forward,
            async_write_metrics,
            **kwargs,
        )
        if precision not in (torch.float16, torch.bfloat16):
            raise ValueError(f"precision must be torch.float16 or torch.bfloat16, got {precision}")
        if isinstance(model, nn.DataParallel) or len(getattr(model, "device_ids", None) or ()) > 1:
            raise ValueError(
                "AMPTrainer needs one device per process; use create_ddp_model instead of "
                "DataParallel"
            )
        self._device_type = self._device.type
        self.precision = precision
        self.log_grad_scaler = log_grad_scaler
        self.grad_scaler = grad_scaler or torch.amp.GradScaler(
            self._device_type, enabled=precision == torch.float16
        )
        self._unscaled = False  # whether the gradients of this step are unscaled
        if self.grad_scaler.is_enabled() and skips_on_device(optimizer):
            start_momentum(optimizer)

    def compute_losses(self, batch: Any) -> Losses:
        with torch.autocast(self._device_type, dtype=self.precision):
            return super().compute_losses(batch)

    def backward(self, loss: Tensor) -> None:
        self.grad_scaler.scale(loss).backward()

    def before_update(self) -> None:
        """Unscale the gradients, then as in `SimpleTrainer`."""
        self.unscale()
        super().before_update()

    def unscale(self) -> None:
        """Divide the gradients by the scale, and note on the device whether they are finite."""
        scaler = self.grad_scaler
        if not scaler.is_enabled():
            return
        if self._unscaled:  # the last step failed after this point; reset the scaler
            scaler.update(scaler.get_scale())
        self._unscaled = True
        scaler.unscale_(self.optimizer)
        # step() reads this tensor to decide whether to update; the public API would wait for the
        # device
        flags = cast(dict[torch.device, Tensor], scaler._found_inf_per_device(self.optimizer))
        if not flags:
            raise RuntimeError(
                f"in iteration {self.iter} no parameter of the optimizer has a gradient, so "
                "float16 has nothing to scale: the loss depends on none of them. Give the "
                "optimizer the parameters that the loss depends on, or return a loss that "
                "depends on them (for a batch without samples: their sum times 0)"
            )
        [self._skip_flag] = flags.values()  # the model is on one device
        # torch shares a flag only among the ranks that hold a gradient
        if comm.get_data_group_size() > 1:
            dist.all_reduce(self._skip_flag, dist.ReduceOp.MAX)

    def flags(self) -> dict[str, Tensor]:
        flags = super().flags()
        if self.grad_scaler.is_enabled():
            flags[SKIP_FLAG] = self._skip_flag
            if self.log_grad_scaler:
                flags[_SCALE_FLAG] = cast(Tensor, self.grad_scaler._get_scale_async()).clone()
        return flags

    def update(self) -> None:
        if not self.grad_scaler.is_enabled():
            super().update()
            return
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self._unscaled = False

    def judge_numbers(self, storage: EventStorage, iter: int, values: dict[str, Any]) -> str | None:
        if _SCALE_FLAG in values:
            scale = values.pop(_SCALE_FLAG)
            storage.put_scalar(SCALE, scale, smoothing_hint=False, cur_iter=iter)
        return super().judge_numbers(storage, iter, values)

    def saved_objects(self) -> Sequence[Any]:
        return [*super().saved_objects(), self.grad_scaler]

    def step_state_dict(self) -> dict[str, Any]:
        return {**super().step_state_dict(), "grad_scaler": self.grad_scaler.state_dict()}

    def load_step_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_step_state_dict(state_dict)
        if not self.grad_scaler.is_enabled():
            return
        if state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        else:
            logger.warning(
                "The checkpoint has no gradient scale; it starts from %g",
                self.grad_scaler.get_scale(),
            )


def fixed_scaler(device_type: str, scale: float) -> torch.amp.GradScaler:
    """A scaler for float16 whose scale never changes."""
    scaler = torch.amp.GradScaler(device_type, init_scale=scale)
    scaler.set_growth_factor(1.0)
    scaler.set_backoff_factor(1.0)
    return scaler
