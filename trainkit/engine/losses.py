"""The losses that a model returns, and values that are not finite."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from trainkit.utils.errors import add_line

_SMALL = (
    1024  # tensors of at most so many values are checked together, since each call has its price
)


class Losses(dict[str, Tensor]):
    """A model's losses by name, each of shape ``[]``, as the model has returned them, and its further outputs.

    Attributes:
        trained: the names of the losses that are minimized; ``total`` is their sum.
    """

    __slots__ = ("outputs", "total", "trained")

    def __init__(
        self,
        values: Mapping[str, Tensor],
        trained: Sequence[str],
        outputs: Any = None,
        *,
        total: Tensor | None = None,
    ) -> None:
        super().__init__(values)
        if total is None:
            total = self[trained[0]]
            for name in trained[1:]:
                total = total + self[name]
        self.total = total
        self.trained = trained
        self.outputs = outputs

    @property
    def detached(self) -> dict[str, Tensor]:
        """The values without their graph."""
        return {name: value.detach() for name, value in self.items()}

    @property
    def single_name(self) -> str:
        """The name of a loss that is alone, and so is the total; "" if there are several, or if it has no name."""
        if len(self) > 1 or "total_loss" in self:
            return ""
        [name] = self
        return name

    @property
    def scalars(self) -> dict[str, Tensor]:
        """The values to store, without their graph: the total, and each loss if there are several."""
        scalars = {"total_loss": self.total}
        if len(self) > 1:
            scalars.update(self)
        for name, value in scalars.items():
            # without a graph it may be a buffer, which the next step changes
            scalars[name] = value.detach() if value.grad_fn is not None else value.detach().clone()
        return scalars

    def read(self) -> dict[str, float]:
        """`scalars` as numbers; waits for their device."""
        numbers = {"total_loss": self.total.item()}
        if len(self) > 1:
            for name, value in self.items():
                numbers[name] = value.item()
        return numbers

    def detach(self) -> "Losses":
        return Losses(self.detached, self.trained, self.outputs, total=self.total.detach())


def as_losses(loss_dict: Mapping[str, Tensor | float]) -> Losses:
    """Losses that somebody has put into a dict; those that require grad are trained, or all if none does.

    Raises:
        ValueError: there is no entry, or one is not one number.
    """
    if isinstance(loss_dict, Losses):
        return loss_dict
    if not loss_dict:
        raise ValueError("loss_dict is empty; there is nothing to write")
    values = {}
    for name, value in loss_dict.items():
        tensor = torch.as_tensor(value)
        if tensor.numel() != 1:
            shape = list(tensor.shape)
            raise ValueError(f"the loss {name!r} has the shape {shape}, not one number")
        values[name] = tensor.reshape(())
    trained = [name for name, value in values.items() if value.requires_grad]
    return Losses(values, trained or list(values))


def explain_first_call(batch: Any, error: Exception) -> None:
    """Add to the error of the first forward pass what a model gets and returns."""
    add_line(
        error,
        f"The model was called as model(batch); batch is {describe_batch(batch)}. A model takes a whole batch, and "
        "returns its loss, or a dict of losses. losses_from(model, loss_fn) adapts a network that takes inputs, and "
        "losses_from(model) one that takes the entries of a dict by name and returns an object with a loss",
    )


def describe_batch(batch: Any) -> str:
    """The kinds of the parts of a batch, for messages."""
    if isinstance(batch, Tensor):
        return f"a tensor {list(batch.shape)}"
    if isinstance(batch, Mapping):
        parts = [f"{key!r}: {_kind_of(value)}" for key, value in batch.items()]
        return f"a dict {{{', '.join(parts[:8])}}}"
    if isinstance(batch, list | tuple):
        parts = [_kind_of(value) for value in batch]
        return f"a {type(batch).__name__} of {len(batch)}: {', '.join(parts[:8])}"
    return f"a {type(batch).__name__}"


def _kind_of(value: Any) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def parse_losses(returned: object) -> Losses:
    """Read the result of a model in training: a scalar tensor, or a dict of scalar tensors by name.

    Entries that require grad are trained; others are only logged. The entry ``outputs`` may be anything.

    Raises:
        TypeError: ``returned`` or an entry is something else.
        ValueError: an entry is not a scalar, no entry requires grad, or an entry is called ``total_loss``.
    """
    if isinstance(returned, Tensor):
        values = {"total_loss": returned}
    elif not isinstance(returned, dict | Mapping):
        raise TypeError(
            f"the model returned {type(returned).__name__}; accepted: a loss, or a dict of losses by name"
        )
    elif "total_loss" in (values := dict(returned)):
        raise ValueError(
            "the model returned an entry total_loss, which is the name of the sum; give it another name"
        )
    outputs, trained = values.pop("outputs", None), []
    for name, value in values.items():
        if not isinstance(value, Tensor) or type(name) is not str:
            raise TypeError(
                f"the model returned {name!r}: {value!r}; accepted: names as text, with scalar tensors"
            )
        if value.ndim > 0:
            if value.numel() != 1:
                shape = list(value.shape)
                raise ValueError(
                    f"the model's loss {name!r} has the shape {shape}; accepted: a scalar, see losses_from"
                )
            # only if needed, since it adds a step to the backward pass
            values[name] = value.reshape(())
        if value.requires_grad:
            trained.append(name)
    if not trained:
        raise ValueError(
            f"none of the losses {sorted(values)} that the model returned requires grad"
        )
    return Losses(values, trained, outputs)


def mean_losses(losses: Sequence[Losses]) -> Losses:
    """The mean of each entry over micro-batches, and the list of their outputs.

    If a micro-batch does not have an entry, a loss counts as 0, as in the minimized sum; a value that is only logged is
    averaged over the other micro-batches.
    """
    trained = list(dict.fromkeys(name for part in losses for name in part.trained))
    means = {}
    for name in dict.fromkeys(name for part in losses for name in part):
        values = torch.stack([part[name] for part in losses if name in part])
        means[name] = values.sum() / (len(losses) if name in trained else len(values))
    return Losses(means, trained, [part.outputs for part in losses])


# ---------------------------------------------------------------------- values that are not finite


@torch.no_grad()
def non_finite_names(model: nn.Module, except_for: Collection[str] = ()) -> list[str]:
    """Names of parameters and buffers with a value that is not finite on this rank; waits for the device.

    Sparse and nested tensors are not looked at.
    """
    values = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in except_for and _can_be_checked(tensor):
            own_part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            # float8 has no operations
            values[name] = own_part.float() if own_part.itemsize == 1 else own_part
    if are_certainly_finite(list(values.values())):
        return []
    return [name for name, tensor in values.items() if not tensor.isfinite().all()]


def _can_be_checked(tensor: Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    return tensor.is_floating_point() or tensor.is_complex()


def are_certainly_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all values are finite; fast. False also if their norm is too large for their type."""
    large: list[Tensor] = []
    small: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > _SMALL:
            large.append(tensor)
        else:
            small.setdefault((tensor.device, tensor.dtype, tensor.shape), []).append(tensor)
    stacked = [torch.stack(group) for group in small.values()]
    return bool(get_total_norm(large + stacked).isfinite())


def describe_failure(what: str, iter: int, values: Mapping[str, Any], more: str = "") -> str:
    numbers = {name: float(value) for name, value in values.items() if not name.startswith("[")}
    return (
        f"the {what} not finite in iteration {iter}: {numbers}{more}. Lower the learning rate, clip gradients, or look "
        "at the batch of this iteration"
    )


def raise_failure(by_rank: Sequence[str | None]) -> None:
    """Raise the first failure, if there is one; every rank passes the same list.

    Raises:
        FloatingPointError: a rank has a failure; with several ranks the message names it.
    """
    for rank, failure in enumerate(by_rank):
        if failure is not None:
            raise FloatingPointError(
                failure if len(by_rank) == 1 else f"{failure} (on rank {rank})"
            )
