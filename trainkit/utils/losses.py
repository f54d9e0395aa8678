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
    if isinstance(returned, Tensor):
        values = {"total_loss": returned}
    elif isinstance(returned, Mapping):
        values = dict(returned)
        if "total_loss" in values:
            raise ValueError("total_loss is the name of the sum of the losses; give the model's entry another name")
    else:
        raise TypeError(
            "a model must give its training loss as a tensor or as a dict of tensors by name; "
            f"this one gave {type(returned).__name__}"
        )
    outputs = values.pop("outputs", None)
    trained = []
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(f"the names of the model's losses must be text, got {name!r}; use a name such as 'loss_a'")
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the model's loss {name!r} must be a scalar tensor, got {type(value).__name__} ({value!r})"
            )
        if value.ndim > 0:
            if value.numel() != 1:
                raise ValueError(
                    f"the model's loss {name!r} must be a scalar, got shape {list(value.shape)}; reduce it first "
                    "(trainkit.modeling.losses_from takes models that return logits)"
                )
            values[name] = value.reshape(())  # only if needed, since it adds a step to the backward pass
        if value.requires_grad:
            trained.append(name)
    if not trained:
        raise ValueError(
            f"the model returned no loss that requires grad; got {sorted(values) or 'an empty dict'}. "
            "Is a parameter frozen that should be trained, or the loss computed under no_grad or detached?"
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
