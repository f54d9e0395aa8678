"""What a trainer does about values that are not finite: a policy, which the step asks."""

import math
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.engine.finite import describe_failure
from trainkit.engine.losses import Losses
from trainkit.utils.events.storage import EventStorage
from trainkit.utils.periods import check_period

SKIP_FLAG = "[flag]not_finite"
"""A value of a step: 1 if the update is left out, by a gradient scaler or a policy."""


class NonFinitePolicy:
    """The policy "raise": a loss, or a norm of gradients, that is not finite ends the run.

    Updates that are left out are no failures: they are counted, and too many in a row end the run.

    Args:
        max_in_row: this number of updates in a row that are left out ends the run. After 25 of them
            a gradient scale of 2**16 has fallen to 2**-9.

    Attributes:
        name: in a config.
        skipped_updates: the number of updates that were left out.
    """

    name = "raise"

    def __init__(self, max_in_row: int = 25) -> None:
        self.max_in_row = check_period("max_non_finite_in_row", max_in_row, minimum=1)
        self.skipped_updates = 0
        self._skipped_in_row = 0

    # ------------------------------------------------------------------ in a step
    # Nothing here waits for the device.

    def bind(self, optimizer: Any) -> None:
        """Called when the trainer is built.

        Raises ConfigError if the policy cannot work with the optimizer.
        """

    def before_gradients(self, model: nn.Module) -> None:
        """Called before the forward pass."""

    def see_gradients(self, optimizer: Any, model: nn.Module, losses: Losses) -> dict[str, Tensor]:
        """Called after ``after_backward``, before gradients are clipped; they are unscaled.

        Returns values for `judge` and `judge_numbers`, shape ``[]``, on the device.
        """
        return {}

    def judge(self, extra: dict[str, Tensor], model: nn.Module) -> None:
        """Called after clipping, to decide on the device whether `update` leaves out the update.

        It may change ``extra``, the values of this step for `judge_numbers`.
        """

    def update(self, optimizer: Any) -> None:
        """Do the update, or leave it out."""
        optimizer.step()

    # ------------------------------------------------------------------ later, maybe in a thread

    def judge_numbers(
        self, storage: EventStorage, iter: int, values: dict[str, Any], gather_period: int
    ) -> str | None:
        """Judge the numbers of an iteration; called in the order of the iterations.

        Args:
            storage: gets further values of the iteration.
            values: name -> number; what is removed here is not stored.
            gather_period: metrics are stored after each so many iterations.

        Returns:
            A description of what is not finite, which all ranks raise together.
        """
        if SKIP_FLAG not in values:
            return self.describe(iter, values)
        is_skipped = bool(values.pop(SKIP_FLAG))
        self.skipped_updates += is_skipped
        if is_skipped:
            self._skipped_in_row += 1
        else:
            self._skipped_in_row = 0
        if (iter + 1) % gather_period == 0:
            storage.put_scalar(
                "skipped_updates", self.skipped_updates, smoothing_hint=False, cur_iter=iter
            )
        if not is_skipped:
            return self.describe(iter, values)
        failure = self._describe_skipped(iter, values)
        if not math.isfinite(values["total_loss"]):
            _drop_not_finite(values)
        return failure

    def describe(self, iter: int, values: dict[str, Any]) -> str | None:
        """What is not finite in an iteration whose update was made."""
        if not math.isfinite(values["total_loss"]):
            return describe_failure("loss is", iter, values)
        if not math.isfinite(values.get("grad_norm", 0.0)):
            return describe_failure("gradients are", iter, values)
        return None

    def _describe_skipped(self, iter: int, values: dict[str, Any]) -> str | None:
        """Whether too many updates in a row were left out."""
        if self._skipped_in_row < self.max_in_row:
            return None
        is_loss_finite = math.isfinite(values["total_loss"])
        what = "gradients are" if is_loss_finite else "loss is"
        text = f"; this is update {self._skipped_in_row} in a row that is skipped"
        return describe_failure(what, iter, values, text)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped_updates, "in_row": self._skipped_in_row}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue the counts; files of detectron2 have none."""
        self.skipped_updates = state_dict.get("skipped", 0)
        self._skipped_in_row = state_dict.get("in_row", 0)


class IgnoreNonFinite(NonFinitePolicy):
    """The policy "ignore": nothing is checked."""

    name = "ignore"

    def describe(self, iter: int, values: dict[str, Any]) -> str | None:
        return None

    def _describe_skipped(self, iter: int, values: dict[str, Any]) -> str | None:
        return None


def _drop_not_finite(values: dict[str, Any]) -> None:
    """They would spoil every average."""
    for name, value in list(values.items()):
        if not math.isfinite(value):
            del values[name]


POLICIES = {policy.name: policy for policy in (NonFinitePolicy, IgnoreNonFinite)}
"""name -> policy; projects have others."""


def make_policy(policy: str | NonFinitePolicy, max_in_row: int) -> NonFinitePolicy:
    """Raises ValueError if the name is not one of `POLICIES`."""
    if isinstance(policy, NonFinitePolicy):
        return policy
    if policy in POLICIES:
        return POLICIES[policy](max_in_row)
    raise ValueError(
        f"non_finite must be 'raise', 'ignore' or a NonFinitePolicy, got {policy!r}; projects have "
        "other policies"
    )


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether ``step()`` can leave out an update by a flag on the device.

    torch's fused optimizers can.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False)
