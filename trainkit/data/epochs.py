"""Tells the epoch to datasets and samplers that have ``set_epoch(epoch)``, also inside wrappers.

Such an object is called a listener. A loader may instead name its own ones.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeGuard

from torch.utils.data import DataLoader

_MOST_PARTS = 1000  # a list with more entries holds samples, not datasets
_NUMBERS = itertools.count()  # of the tellers; an id may come again


class WithListeners(Protocol):
    """A loader that says whom a trainer tells the epoch, and tells its dataset itself."""

    epoch_listeners: list[Any]


def has_listeners(loader: Any) -> TypeGuard[WithListeners]:
    """Whether it names its listeners, as `ResumableLoader` does."""
    return hasattr(loader, "epoch_listeners")


def is_listener(part: Any) -> bool:
    """Whether it has a method ``set_epoch``."""
    return callable(getattr(part, "set_epoch", None))


def listeners_in(part: Any, *, except_for: Iterable[Any] = ()) -> list[Any]:
    """The objects in a dataset, a sampler or a loader whose ``set_epoch(epoch)`` must be called.

    The search looks at attributes, and at the entries of lists, tuples and dicts there. It ends at
    an object that has ``set_epoch``: a wrapper with this method tells what it wraps itself.
    ``except_for`` are not looked at.
    """
    found: list[Any] = []
    seen = {id(other) for other in except_for}
    _search(part, found, seen)
    return found


def _search(part: Any, found: list[Any], seen: set[int]) -> None:
    """Append the listeners in ``part`` to ``found``; ``seen`` are ids of what is not looked at."""
    if id(part) in seen or isinstance(part, type):
        return
    seen.add(id(part))
    if has_listeners(part):
        found.extend(part.epoch_listeners)
    elif is_listener(part):
        found.append(part)
    else:
        for inner in _parts_of(part):
            _search(inner, found, seen)


def _parts_of(part: Any) -> list[Any]:
    """What a loader, a dataset or a sampler holds that may be a listener."""
    if isinstance(part, DataLoader):
        return [part.dataset, part.sampler, part.batch_sampler]
    # also what only wraps others: a sample or a transform has neither of these methods
    if not hasattr(type(part), "__getitem__") and not hasattr(type(part), "__iter__"):
        return []
    attributes = dict(getattr(part, "__dict__", {}))
    for name in ("dataset", "datasets"):  # also of a class with __slots__
        if hasattr(part, name):
            attributes[name] = getattr(part, name)
    parts: list[Any] = []
    for name, value in attributes.items():
        if not isinstance(value, Mapping | list | tuple):
            parts.append(value)
            continue
        holds_samples = len(value) > _MOST_PARTS and name != "datasets"
        if holds_samples:
            continue
        if isinstance(value, Mapping):
            parts.extend(value.values())
        else:
            parts.extend(value)
    return parts


def epoch_listeners(loader: Any) -> list[Any]:
    """The objects whose ``set_epoch(epoch)`` a trainer calls before each pass over ``loader``."""
    if has_listeners(loader):
        return list(loader.epoch_listeners)
    found: list[Any] = []
    if is_listener(loader):
        found.append(loader)
    for part in _parts_of(loader):
        found.extend(listeners_in(part))
    unique = {id(listener): listener for listener in found}
    return list(unique.values())


def not_reached(loader: Any) -> str:
    """Why workers are never told a new epoch; empty if they are, or if there is nobody to tell."""
    if not isinstance(loader, DataLoader) or has_listeners(loader):
        return ""
    if not loader.num_workers or not loader.persistent_workers:
        return ""
    names = [type(listener).__name__ for listener in listeners_in(loader.dataset)]
    if not names:
        return ""
    return (
        f"the epoch does not reach {', '.join(names)} in workers, since persistent_workers=True "
        "keeps the copy of the first pass; set it to False, or use trainkit.data.ResumableLoader"
    )


class EpochTeller:
    """Calls ``set_epoch`` of listeners in the process that loads samples, if the epoch has changed.

    Two tellers may have one dataset, as the loaders of several logical ranks do. So each of them
    tells the epoch again after another one has told something.
    """

    _told: tuple[int, int] | None = None  # (number of the teller, epoch), the last of this process

    def __init__(self, listeners: Iterable[Any]) -> None:
        self._listeners = list(listeners)
        self._number = next(_NUMBERS)

    def tell(self, epoch: int) -> None:
        now = (self._number, epoch)
        if EpochTeller._told != now:
            EpochTeller._told = now
            for listener in self._listeners:
                listener.set_epoch(epoch)
