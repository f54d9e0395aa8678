"""Train models that return logits."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


def _split(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        inputs = dict(batch)
        target = inputs.pop("label" if "label" in inputs else "labels", None)
        return inputs if len(inputs) > 1 else [*inputs.values()], target
    tensors = [batch] if isinstance(batch, Tensor) else batch
    if (
        isinstance(tensors, list | tuple)
        and tensors
        and all(isinstance(entry, Tensor) for entry in tensors)
    ):
        return tensors[:-1] or tensors, tensors[-1]
    accepted = (
        "a mapping, a tensor, or a tuple or list of tensors (for others give losses_from split=...)"
    )
    raise TypeError(f"the batch must be {accepted}, got {type(batch).__name__}")


def losses_from(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    split: Callable[[Any], tuple[Any, Any]] = _split,
) -> nn.Module:
    """Let a model that returns logits take whole batches: it then returns losses in train mode, logits in eval mode.

    If the model returns an object with ``logits``, as in Hugging Face, its output is these logits. Calls with several
    arguments, or with arguments by name, are not changed. The model is changed in place and returned: it gets a
    subclass of its class, so the names in its state stay.

    Args:
        loss_fn: called with (output, target), gives a loss or a dict of losses; a module is trained and saved too.
            None: ``model`` is called with all entries of the batch by name, and returns an object with ``loss``.
        split: gives (inputs, target) of a batch. Default: the target is the last of several tensors, or ``label`` or
            ``labels`` of a mapping; the other entries are arguments by name (by position if there is only one).
    """
    original = type(model).forward

    def call(self: Any, batch: Any) -> tuple[Any, Any]:
        inputs, target = split(batch)
        returned = (
            original(self, **inputs) if isinstance(inputs, Mapping) else original(self, *inputs)
        )
        return getattr(returned, "logits", returned), target

    def losses(self: Any, batch: Any) -> Any:
        if self.trainkit_loss is None:
            return original(self, **batch).loss
        output, target = call(self, batch)
        if target is None and split is _split:
            raise ValueError(
                f"no 'label' or 'labels' in the batch with {[*batch]}; give losses_from a function split"
            )
        return self.trainkit_loss(output, target)

    @functools.wraps(original)  # generate() of Hugging Face reads the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return original(self, *args, **kwargs)
        return self.losses(*args) if self.training else call(self, *args)[0]

    model.__class__ = type(
        type(model).__name__, (type(model),), {"forward": forward, "losses": losses}
    )
    model.trainkit_loss = loss_fn  # type: ignore[assignment]
    return model
