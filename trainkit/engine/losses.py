"""The losses that a model returns."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.utils.errors import add_line


class Losses(dict[str, Tensor]):
    """A model's losses by name, each of shape ``[]``, as the model has returned them.

    Attributes:
        trained: the names of the losses that are minimized.
        total: the sum of these.
        outputs: the further outputs of the model.
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
        """The name of the only loss, which is the total.

        "" if there are several losses, or if it has no name of its own.
        """
        if len(self) > 1 or "total_loss" in self:
            return ""
        [name] = self
        return name

    @property
    def scalars(self) -> dict[str, Tensor]:
        """The values to store, without their graph.

        They are the total, and each loss if there are several.
        """
        scalars = {"total_loss": self.total}
        if len(self) > 1:
            scalars.update(self)
        for name, value in scalars.items():
            scalars[name] = value.detach()
            if value.grad_fn is None:  # it may be a buffer, which the next step changes
                scalars[name] = scalars[name].clone()
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
    """Losses that somebody has put into a dict.

    Those that require grad are trained, or all if none does.

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
        f"The model was called as model(batch); batch is {describe_batch(batch)}. A model takes a "
        "whole batch, and returns its loss, or a dict of losses. losses_from(model, loss_fn) "
        "adapts a network that takes inputs, and losses_from(model) one that takes the entries of "
        "a dict by name and returns an object with a loss",
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

    Entries that require grad are trained; others are only logged. The entry ``outputs`` may be
    anything.

    Raises:
        TypeError: ``returned`` or an entry is something else.
        ValueError: an entry is not a scalar, no entry requires grad, or an entry is called
            ``total_loss``.
    """
    values = _entries_of(returned)
    outputs = values.pop("outputs", None)
    trained = []
    for name, value in values.items():
        if not isinstance(value, Tensor) or type(name) is not str:
            raise TypeError(
                f"the model returned {name!r}: {value!r}; accepted: names as text, with scalar "
                "tensors"
            )
        if value.ndim > 0:
            if value.numel() != 1:
                shape = list(value.shape)
                raise ValueError(
                    f"the model's loss {name!r} has the shape {shape}; accepted: a scalar, see "
                    "losses_from"
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


def _entries_of(returned: object) -> dict[str, Any]:
    """The entries of a dict that a model has returned; a tensor is the entry ``total_loss``."""
    if isinstance(returned, Tensor):
        return {"total_loss": returned}
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"the model returned {type(returned).__name__}; accepted: a loss, or a dict of losses "
            "by name"
        )
    if "total_loss" in returned:
        raise ValueError(
            "the model returned an entry total_loss, which is the name of the sum; give it another "
            "name"
        )
    return dict(returned)


def mean_losses(losses: Sequence[Losses]) -> Losses:
    """The mean of each entry over micro-batches, and the list of their outputs.

    If a micro-batch does not have an entry, a loss counts as 0, as in the minimized sum; a value
    that is only logged is averaged over the other micro-batches.
    """
    values: dict[str, list[Tensor]] = {}
    trained: dict[str, None] = {}  # names in their order, each once
    for part in losses:
        trained.update(dict.fromkeys(part.trained))
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    means = {}
    for name, found in values.items():
        number = len(losses) if name in trained else len(found)
        means[name] = torch.stack(found).sum() / number
    return Losses(means, list(trained), [part.outputs for part in losses])
