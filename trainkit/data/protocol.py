"""What a trainer asks of a loader, whoever made it."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, Protocol, TypeGuard


class WithPosition(Protocol):
    """A loader, or a sampler, whose position can be saved.

    It may also have an attribute ``resume_obstacle``: the reason why its position cannot be saved
    after all, or "".
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def has_position(loader: Any) -> TypeGuard[WithPosition]:
    """Whether it has the methods of `WithPosition`; a wrapper may pass them on."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def resume_obstacle(loader: Iterable[Any]) -> str:
    """The reason why a loader's position cannot be saved; empty if it can."""
    if has_position(loader):
        return getattr(loader, "resume_obstacle", "")
    return (
        f"the data loader ({type(loader).__name__}) has no state_dict() and load_state_dict(), so "
        "the data starts again; use trainkit.data.build_batch_data_loader"
    )


def batches_per_epoch(loader: Any) -> int | Fraction | None:
    """Batches per pass over the data; None for a stream without a length.

    With an endless sampler it may be a fraction. A loader may have an attribute
    ``batches_per_epoch``, an int or a Fraction. No worker is started.
    """
    if hasattr(loader, "batches_per_epoch"):
        return loader.batches_per_epoch
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # an endless sampler, a stream
        return _batches_of_endless(loader)


def _batches_of_endless(loader: Any) -> Fraction | None:
    batch_sampler = getattr(loader, "batch_sampler", None)
    batch_size = getattr(batch_sampler, "batch_size", None)
    sampler: Any = getattr(batch_sampler, "sampler", None)
    if not batch_size or not hasattr(sampler, "samples_per_epoch"):
        return None
    global_batch_size = batch_size * sampler.world_size
    return Fraction(sampler.samples_per_epoch, global_batch_size)


def samples_of(loader: Any) -> tuple[int | None, int | None]:
    """Samples of one pass over the data, and of one batch of this rank.

    None: the loader does not tell it.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None:
        batch_size = getattr(batch_sampler, "batch_size", None)

    sampler = getattr(batch_sampler, "sampler", None)
    samples = getattr(sampler, "samples_per_epoch", None)
    if samples is None:
        try:
            samples = len(loader.dataset)
        except (AttributeError, TypeError, NotImplementedError):  # a list of batches, a stream
            samples = None
    return samples, batch_size
