"""What a trainer asks of a loader, whoever made it."""

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from trainkit.utils.periods import round_length


def resume_obstacle(loader: Iterable[Any]) -> str:
    """The reason why a loader's position cannot be saved, as its attribute ``resume_obstacle``; empty if it can."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return getattr(loader, "resume_obstacle", "")
    name, remedy = type(loader).__name__, "use trainkit.data.build_batch_data_loader"
    return f"the data loader ({name}) has no state_dict() and load_state_dict(), so the data starts again; {remedy}"


def iters_per_epoch(loader: Any) -> int | None:
    """`epoch_length`, rounded."""
    length = epoch_length(loader)
    return None if length is None else round_length(length)


def epoch_length(loader: Any) -> int | Fraction | None:
    """Batches per pass over the data, with a fraction for an endless sampler; None for a stream without a length.

    A loader may have an attribute ``batches_per_epoch``, an int or a Fraction. No worker is started.
    """
    if hasattr(loader, "batches_per_epoch"):
        return loader.batches_per_epoch
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # an endless sampler, a stream
        batches: Any = getattr(loader, "batch_sampler", None)
    sampler, size = getattr(batches, "sampler", None), getattr(batches, "batch_size", None)
    if sampler is None or not size or not hasattr(sampler, "samples_per_epoch"):
        return None
    return Fraction(sampler.samples_per_epoch, size * sampler.world_size)


def samples_of(loader: Any) -> tuple[int | None, int | None]:
    """Samples of one pass over the data, and of one batch of this rank; None: a loader that does not tell."""
    batches = getattr(loader, "batch_sampler", None)
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None:
        batch_size = getattr(batches, "batch_size", None)
    samples = getattr(getattr(batches, "sampler", None), "samples_per_epoch", None)
    if samples is None:
        try:
            samples = len(loader.dataset)
        except (AttributeError, TypeError, NotImplementedError):  # a list of batches, a stream
            samples = None
    return samples, batch_size
