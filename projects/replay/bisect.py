"""Find the samples of a batch with which a step fails, or the sample with the largest loss."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only
from trainkit.projects.evaluators.batches import num_samples

from trainkit.utils.device import unwrap_model
from trainkit.utils.env import get_rng_state, set_rng_state


def find_samples(step: Any, batch: Any, names: Sequence[str]) -> str:
    """Run the forward pass of ``step`` with each sample of a batch alone, to find those with which it fails.

    Each pass starts from the same random state and buffers. No gradients are averaged over ranks, and no hook is
    called. The sample is in its batch twice, since batch norm does not accept a single one. If the step does not fail,
    the sample with the largest loss is named.

    Args:
        step: a `SimpleTrainer`.
        batch: a list of samples, or nested containers of tensors whose first dimension is the sample.
        names: the names of the samples; empty if they are not known.
    """
    model, rng = unwrap_model(step.model), get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def outcome(batch: Any) -> float | str:
        set_rng_state(rng)
        try:
            return float(step.compute_losses(batch).total)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            for name, buffer in model.named_buffers():
                buffer.data.copy_(buffers.get(name, buffer))

    size = num_samples(batch)
    names = names if len(names) == size else [f"sample {i} of the batch" for i in range(size)]
    step.call_model = model  # a data-parallel wrapper would wait for the other ranks
    try:
        whole, alone = outcome(batch), {names[i]: outcome(_twice(batch, i, size)) for i in range(size)}
    finally:
        del step.call_model
    if isinstance(whole, str) or not math.isfinite(whole):
        bad = [name for name, found in alone.items() if _kind(found) == _kind(whole)]
        what = f"the forward pass ends in {_kind(whole)}" if isinstance(whole, str) else "the loss is not finite"
        if len(bad) == size > 1 or not bad:
            each = f"each of the {size} samples alone, so none of them is the cause" if bad else "no sample alone"
            return f"{what} with {each}"
        return f"{what} with {', '.join(bad[:8])} ({len(bad)} of {size} samples, each alone)"
    losses = {name: loss for name, loss in alone.items() if isinstance(loss, float)}
    if not losses:
        return f"no sample can be run alone: {alone[names[0]]:.200}"
    largest = max(losses, key=lambda name: math.inf if math.isnan(losses[name]) else losses[name])
    median = sorted(losses.values())[len(losses) // 2]
    found = f"the loss is finite; {largest} has the largest one alone: {losses[largest]:.4g} (median {median:.4g})"
    norms = any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
    note = "; batch norm used the statistics of each sample alone, so in the batch another one may be larger"
    return found + note * norms


def _kind(result: float | str) -> str:
    return result.partition(":")[0] if isinstance(result, str) else str(math.isfinite(result))


def _twice(batch: Any, row: int, size: int) -> Any:
    """A batch of one sample, twice."""
    if isinstance(batch, list) and len(batch) == size and not any(isinstance(value, Tensor) for value in batch):
        return [batch[row]] * 2
    return tree_map_only(Tensor, lambda value: value[[row, row]] if value.shape[:1] == (size,) else value, batch)
