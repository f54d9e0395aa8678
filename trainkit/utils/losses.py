"""Read the losses that a model returns; one rule for training and evaluation."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Losses(NamedTuple):
    """A model's losses by name, the names that are summed into ``total``, and its further outputs."""

    values: dict[str, Tensor]  # each of shape []
    trained: list[str]  # the names of losses that require grad
    total: Tensor  # their sum
    outputs: Any = None

    @classmethod
    def of(cls, values: dict[str, Tensor], trained: list[str], outputs: Any = None) -> "Losses":
        total = values[trained[0]]
        for name in trained[1:]:
            total = total + values[name]
        return cls(values, trained, total, outputs)

    @property
    def detached(self) -> dict[str, Tensor]:
        """The values without their graph."""
        return {name: value.detach() for name, value in self.values.items()}

    @property
    def scalars(self) -> dict[str, Tensor]:
        """The values to store, without their graph: the total, and each loss if there are several."""
        scalars = {"total_loss": _for_later(self.total)}
        if len(self.values) > 1:
            for name, value in self.values.items():
                scalars[name] = _for_later(value)
        return scalars

    def detach(self) -> "Losses":
        return Losses(self.detached, self.trained, self.total.detach(), self.outputs)


def _for_later(value: Tensor) -> Tensor:
    """The value without its graph; a copy if it may be a buffer or a parameter, which the next step changes."""
    return value.detach() if value.grad_fn is not None else value.detach().clone()


def parse_losses(returned: object) -> Losses:
    """Read the result of a model in training: a scalar tensor, or a dict of scalar tensors by name.

    Entries that require grad are trained; others are only logged. The entry ``outputs`` may be anything.

    Raises:
        TypeError: ``returned`` is none of these, an entry is not a tensor, or its name is not text.
        ValueError: an entry is not a scalar, no entry requires grad, or an entry is called ``total_loss``.
    """
    if not isinstance(returned, Tensor | Mapping):
        raise TypeError(f"the model returned {type(returned).__name__}; accepted: a loss, or a dict of losses by name")
    values = {"total_loss": returned} if isinstance(returned, Tensor) else dict(returned)
    if "total_loss" in values and isinstance(returned, Mapping):
        raise ValueError("the model returned an entry total_loss, which is the name of the sum; give it another name")
    outputs, trained = values.pop("outputs", None), []
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(f"the model returned {name!r}: {value!r}; accepted: names as text, with scalar tensors")
        if value.numel() != 1:
            raise ValueError(
                f"the model's loss {name!r} has the shape {list(value.shape)}; accepted: a scalar (a model may return "
                "logits in trainkit.modeling.losses_from)"
            )
        if value.ndim > 0:
            values[name] = value.reshape(())  # only if needed, since it adds a step to the backward pass
        if value.requires_grad:
            trained.append(name)
    if not trained:
        raise ValueError(
            f"none of the losses {sorted(values)} that the model returned requires grad: is a parameter frozen, or the "
            "loss detached?"
        )
    return Losses.of(values, trained, outputs)


def mean_losses(losses: Sequence[Losses]) -> Losses:
    """The mean of each entry over micro-batches, and the list of their outputs.

    If a micro-batch does not have an entry, a loss counts as 0, as in the minimized sum; a value that is only logged is
    averaged over the other micro-batches.
    """
    if len(losses) == 1:
        return losses[0]
    trained = list(dict.fromkeys(name for part in losses for name in part.trained))
    means = {}
    for name in dict.fromkeys(name for part in losses for name in part.values):
        values = torch.stack([part.values[name] for part in losses if name in part.values])
        means[name] = values.sum() / (len(losses) if name in trained else len(values))
    return Losses.of(means, trained, [part.outputs for part in losses])
