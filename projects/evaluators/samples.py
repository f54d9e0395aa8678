"""The number of samples of a batch."""

import logging
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from trainkit.data.fetch import trivial_batch_collator
from trainkit.utils.device import unwrap_model
from trainkit.utils.periods import is_whole

logger = logging.getLogger(__name__)


class CountsSamples(Protocol):
    """What a model or a loader may offer if its batches do not show how many samples they have."""

    def num_samples(self, batch: Any) -> int: ...


_warned: "weakref.WeakSet[Any]" = weakref.WeakSet()  # the models whose batches left a doubt


class SampleCounter:
    """``counter(batch)`` is the number of samples in a batch of a loader; -> int.

    The model, or else the loader, may have a method ``num_samples(batch)``. Without it, a list has as many samples as
    entries, unless it is a list of collated tensors: from a loader with torch's ``default_collate``, or of tensors of
    several kinds with one first dimension. Of any other batch it is the first dimension of its tensors. If they
    disagree, that of the first one counts, with one warning per model.

    Raises:
        TypeError: ``counter(batch)``, if the batch is no list and holds no tensor with a dimension.
    """

    def __init__(self, model: Any = None, loader: Any = None) -> None:
        self._model = unwrap_model(model)
        self._collate_fn = getattr(loader, "collate_fn", None)
        self._own: Any = None
        for source in (loader, self._model):
            own = getattr(source, "num_samples", None)
            if callable(own):
                self._own = own

    def __call__(self, batch: Any) -> int:
        if self._own is not None:
            number = self._own(batch)
            if not is_whole(number, 0):
                raise TypeError(f"num_samples(batch) must return an int >= 0, got {number!r}")
            return int(number)
        sizes = _first_dims(batch)
        if self.is_list(batch):
            self._doubt_list(batch, sizes)
            return len(batch)
        if not sizes:
            raise TypeError(
                f"a batch of type {type(batch).__name__} is no list of samples and holds no "
                "tensor to count"
            )
        if len({*sizes}) > 1:
            self._warn(sizes[0], f"the first dimensions of its tensors are {sizes[:8]}")
        return sizes[0]

    def is_list(self, batch: Any) -> bool:
        """Whether the batch is a list with an entry for each sample."""
        if not isinstance(batch, list) or self._collate_fn is default_collate:
            return False
        has_tensors = any(isinstance(entry, Tensor) for entry in batch)
        if self._collate_fn in _AS_THEY_ARE or not has_tensors:
            return True
        kinds = {_kind_of(entry) for entry in batch}
        return len(kinds) == 1

    def _doubt_list(self, batch: list[Any], sizes: list[int]) -> None:
        """Warn if the entries may as well be collated tensors, such as inputs and targets of the same kind."""
        if self._collate_fn in _AS_THEY_ARE:
            return
        are_tensors = all(isinstance(entry, Tensor) for entry in batch)
        if are_tensors and len({*sizes}) == 1 and sizes[0] != len(batch):
            doubt = f"it is a list of {len(batch)} tensors, whose first dimension is {sizes[0]}"
            self._warn(len(batch), doubt)

    def _warn(self, number: int, doubt: str) -> None:
        key = SampleCounter if self._model is None else self._model
        if key in _warned:
            return
        _warned.add(key)
        text = (
            "How many samples a batch has is a guess, %d: %s. Validation losses and "
            "samples_per_sec depend on it; "
            "give the model or the loader a method num_samples(batch)"
        )
        logger.warning(text, number, doubt)


# functions that make a batch of samples, not of tensors
_AS_THEY_ARE = (trivial_batch_collator, list)


def _kind_of(entry: Any) -> Any:
    return (entry.ndim, entry.dtype) if isinstance(entry, Tensor) else type(entry)


def _first_dims(batch: Any) -> list[int]:
    """The first dimension of each tensor that has one."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
