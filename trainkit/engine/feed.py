"""The batches of a trainer: iterator, transfer to the device, position in the data."""

import logging
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any, NoReturn

import torch

from trainkit.data.protocol import batches_per_epoch, resume_obstacle
from trainkit.utils.device import move_to_device

logger = logging.getLogger(__name__)

_END: Any = object()  # in place of a batch: the iterator has ended


class Feed:
    """Gives one batch at a time; when the loader ends, it is iterated again.

    Attributes:
        drawn: the number of batches drawn in this iteration; the trainer sets it to 0 at the start.
        move: a function ``(batch, device)`` that brings a batch to the device of the model, if this
            is not a CPU.
        num_passes: the passes over the present loader that have ended.
        before_pass: called before each pass over the loader; `SimpleTrainer` tells samplers and
            datasets the epoch.
        watchers: functions that are called with each batch, such as one that counts samples.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.drawn = 0
        self.before_pass: Callable[[], None] | None = None
        self.move = move_to_device
        self.watchers: list[Callable[[Any], None]] = []

    @property
    def loader(self) -> Iterable[Any]:
        """The loader; it can be replaced at any time.

        Batches that the old loader has loaded ahead are dropped.
        """
        return self._loader

    @loader.setter
    def loader(self, loader: Iterable[Any]) -> None:
        if callable(loader) and not isinstance(loader, Iterable):
            raise TypeError(f"the data loader is {loader!r}; call it and give what it returns")
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self.num_passes = 0

    def reset(self, data_loader_builder: Callable[[], Iterable[Any]]) -> None:
        """Replace the loader; the old one and its workers end before the new one is built.

        The new loader starts at its own position: to keep the position, give it the ``state_dict``
        of the old one.
        """
        self.loader = ()
        self.loader = data_loader_builder()

    @property
    def iterator(self) -> Iterator[Any]:
        """The iterator of the loader.

        Created at the first use, so a trainer that only evaluates starts no workers.
        """
        if self._iterator is None:
            if self.before_pass is not None:
                self.before_pass()
            self._iterator = iter(self._loader)
        return self._iterator

    def next(self, device: torch.device) -> Any:
        """The next batch, on ``device``; if the loader ends, its next pass starts.

        Raises:
            ValueError: the loader yields no batch.
        """
        iterator = self._iterator
        if iterator is None:
            iterator = self.iterator
        batch = next(iterator, _END)
        if batch is _END:
            self._iterator = None  # ends its workers
            self.num_passes += 1
            batch = next(self.iterator, _END)
            if batch is _END:
                self._raise_no_batch()
        self.drawn += 1
        for watch in self.watchers:
            watch(batch)
        if device.type == "cpu":
            return batch
        return self.move(batch, device)

    def _raise_no_batch(self) -> NoReturn:
        if isinstance(self._loader, Iterator):
            reason = "is an iterator that has ended"
        else:
            reason = "yields no batch"
        raise ValueError(
            f"the data loader ({type(self._loader).__name__}) {reason}; give a loader that can be "
            "iterated again and has at least one batch (is the dataset smaller than a batch, "
            "with drop_last?)"
        )

    def epoch_length(self, accumulation_steps: int) -> Fraction:
        """Iterations per pass over the data, from the length of the loader or its dataset.

        Not rounded.

        Raises:
            ValueError: the data has no length.
        """
        batches = batches_per_epoch(self._loader)
        if batches is None:
            kind = type(self._loader).__name__
            raise ValueError(
                f"the training data ({kind}) has no length, so there are no epochs; use iterations"
            )
        return Fraction(batches) / accumulation_steps

    @property
    def obstacle(self) -> str:
        """The reason why a resumed run does not continue at its position in the data.

        Empty if it does.
        """
        return resume_obstacle(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data after the batches given so far.

        Empty if the loader does not support it.
        """
        if self.obstacle:
            return {}
        return self._loader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the loader continue at this position.

        Batches that it has loaded ahead are dropped.
        """
        obstacle = self.obstacle
        self.loader = self._loader  # drops its iterator
        if state_dict and not obstacle:
            self._loader.load_state_dict(state_dict)  # type: ignore[attr-defined]
        elif state_dict or not obstacle:  # an obstacle that the saved run had too is no news
            reason = obstacle or "their position is not in the checkpoint"
            logger.warning("The data start again: %s", reason)
