"""Find the samples of a batch with which a step fails, or the sample with the largest loss."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from trainkit.projects.evaluators.batches import num_samples

from trainkit.utils.device import unwrap_model
from trainkit.utils.env import get_rng_state, set_rng_state

_Outcome = float | str  # the loss, or the error


def find_samples(step: Any, batches: Sequence[Any], names: Sequence[Sequence[str]]) -> str:
    """Run the forward pass of ``step`` with parts of each batch, to find the samples with which it fails.

    Each forward pass starts from the same random state and buffers. No gradients are averaged over ranks, and no hook
    is called.

    Args:
        step: a `SimpleTrainer`.
        names: the names of the samples of each batch; empty if they are not known.

    Returns:
        For each batch: the samples with which it fails, or if it does not fail, the sample with the largest loss.
    """
    model, rng = unwrap_model(step.model), get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def outcome(batch: Any) -> _Outcome:
        set_rng_state(rng)
        try:
            return float(step.compute_losses(batch).total)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.data.copy_(buffers[name])

    norms = any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
    note = "; batch norm used the statistics of each sample alone, so in the batch another one may be larger" * norms
    step.call_model = model  # a data-parallel wrapper would wait for the other ranks
    try:
        return "; ".join(
            _describe(outcome, batch, names[i] if i < len(names) else [], note) for i, batch in enumerate(batches)
        )
    finally:
        del step.call_model


def _describe(outcome: Callable[[Any], _Outcome], batch: Any, names: Sequence[str], note: str) -> str:
    size = num_samples(batch)
    names = names if len(names) == size else [f"sample {i} of the batch" for i in range(size)]
    whole, alone = outcome(batch), [_alone(outcome, batch, i, size) for i in range(size)]
    if _kind(whole) == "finite":
        losses = {name: loss for name, loss in zip(names, alone, strict=True) if isinstance(loss, float)}
        if not losses:
            return f"no sample can be run alone: {alone[0]:.200}"
        largest = max(losses, key=lambda name: math.inf if math.isnan(losses[name]) else losses[name])
        median = sorted(losses.values())[len(losses) // 2]
        found = f"the loss is finite; {largest} has the largest one alone: {losses[largest]:.4g} (median {median:.4g})"
        return f"{found}{note}"
    what = "the loss is not finite" if isinstance(whole, float) else f"the forward pass ends in {_kind(whole)}"
    bad = [name for name, result in zip(names, alone, strict=True) if _kind(result) == _kind(whole)]
    if len(bad) == size > 1:
        return f"{what} with each of the {size} samples alone, so none of them is the cause"
    if bad:
        return f"{what} with {', '.join(bad[:8])} ({len(bad)} of {size} samples, each alone)"
    rows = [*range(size)]
    while len(rows) > 1:
        halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        failing = [half for half in halves if _kind(outcome(take(batch, half, size))) == _kind(whole)]
        if not failing:
            break
        rows = failing[0]
    return f"{what} with no sample alone, but with these {len(rows)} of {size}: {', '.join(names[i] for i in rows[:8])}"


def _alone(outcome: Callable[[Any], _Outcome], batch: Any, row: int, size: int) -> _Outcome:
    """The outcome of one sample; the sample is used twice if the model does not accept a single one (batch norm)."""
    found = outcome(take(batch, [row], size))
    return found if isinstance(found, float) else outcome(take(batch, [row, row], size))


def _kind(result: _Outcome) -> str:
    if isinstance(result, str):
        return result.partition(":")[0]
    return "finite" if math.isfinite(result) else "not finite"


def take(batch: Any, rows: Sequence[int], size: int) -> Any:
    """The samples ``rows`` of a batch of ``size`` samples.

    The batch is a list of samples, or nested containers of tensors and lists whose first dimension is the sample.
    """
    if isinstance(batch, Tensor):
        return batch[[*rows]] if batch.dim() and len(batch) == size else batch
    if isinstance(batch, Mapping):
        return {key: take(value, rows, size) for key, value in batch.items()}
    if isinstance(batch, list) and len(batch) == size and not any(isinstance(value, Tensor) for value in batch):
        return [batch[row] for row in rows]
    if isinstance(batch, list | tuple):
        items = [take(value, rows, size) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
