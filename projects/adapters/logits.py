"""Train models that return logits."""

import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import Tensor, nn


def losses_from(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    split: Callable[[Any], tuple[Any, Any]] | None = None,
) -> nn.Module:
    """Let a model that returns logits take whole batches: it then returns losses in train mode, logits in eval mode.

    If the model returns an object with ``logits``, as in Hugging Face, its output is these logits. Calls with several
    arguments, or with arguments by name, are not changed. The same model is returned: its ``forward`` is replaced, and
    it gets a method ``losses(batch)``. Its class and the names in its state stay.

    Args:
        loss_fn: called with (output, target), gives a loss or a dict of losses; a module is trained and saved too.
            None: ``model`` is called with all entries of the batch by name, and returns an object with ``loss``.
        split: gives (inputs, target) of a batch. Default: the target is the last of several tensors, or ``label`` or
            ``labels`` of a mapping; the other entries are arguments by name (by position if there is only one).
    """
    original = type(model).forward

    def split_batch(batch: Any) -> tuple[Any, Any]:
        if split is not None:
            return split(batch)
        if isinstance(batch, Mapping):
            return _split_mapping(batch)
        return _split_tensors(batch)

    def output_of(model: Any, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            returned = original(model, **inputs)
        else:
            returned = original(model, *inputs)
        return getattr(returned, "logits", returned)

    def losses(self: Any, batch: Any) -> Any:
        if self.trainkit_loss is None:
            return original(self, **batch).loss
        inputs, target = split_batch(batch)
        output = output_of(self, inputs)
        if target is None and split is None:
            raise ValueError(
                f"no 'label' or 'labels' in the batch with {[*batch]}; give losses_from a "
                "function split"
            )
        return self.trainkit_loss(output, target)

    @functools.wraps(original)  # generate() of Hugging Face reads the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_batch = len(args) == 1 and not kwargs
        if not is_batch:
            return original(self, *args, **kwargs)
        batch = args[0]
        if self.training:
            return self.losses(batch)
        inputs, _ = split_batch(batch)
        return output_of(self, inputs)

    model.trainkit_loss = loss_fn  # type: ignore[assignment]  # a module becomes a part of the model
    # bound methods: those of a copy of the model belong to the copy
    model.forward = MethodType(forward, model)
    model.losses = MethodType(losses, model)  # type: ignore[assignment]
    return model


def _split_mapping(batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """The entries without the label, and the label; None if there is none."""
    inputs = dict(batch)
    label_key = "label" if "label" in inputs else "labels"
    target = inputs.pop(label_key, None)
    if len(inputs) > 1:
        return inputs, target
    return [*inputs.values()], target


def _split_tensors(batch: Any) -> tuple[Any, Any]:
    """All but the last tensor, and the last one; a single tensor is both."""
    if isinstance(batch, Tensor):
        return [batch], batch
    are_tensors = (
        isinstance(batch, list | tuple)
        and len(batch) > 0
        and all(isinstance(entry, Tensor) for entry in batch)
    )
    if not are_tensors:
        raise TypeError(
            "the batch must be a mapping, a tensor, or a tuple or list of tensors "
            f"(for others give losses_from split=...), got {type(batch).__name__}"
        )
    target = batch[-1]
    if len(batch) == 1:
        return batch, target
    return batch[:-1], target
