"""The batches of a trainer: iterator, micro-batches, transfer to the device, position in the data."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch

from trainkit.data.protocol import iters_per_epoch, resume_obstacle
from trainkit.utils.device import Prefetcher
from trainkit.utils.periods import check_period, exact, whole_or_rounded
from trainkit.utils.waiting import next_batch

logger = logging.getLogger(__name__)

_END = object()


class Feed:
    """Gives the micro-batches of each iteration; when the loader ends, it is iterated again.

    Attributes:
        accumulation_steps: micro-batches per iteration; with a schedule, their number in the last iteration.
        schedule: pairs (iteration, number): from that iteration on, ``accumulation_steps`` is that number. The first
            iteration is 0. Such a feed has no epochs.
        before_pass: called before the loader is iterated again, with the fraction of the iteration that is drawn.
    """

    def __init__(self, loader: Iterable[Any], accumulation_steps: int | Sequence[tuple[int, int]] = 1) -> None:
        pairs = [*accumulation_steps] if isinstance(accumulation_steps, Sequence) else [(0, accumulation_steps)]
        if not pairs or pairs[0][0] != 0 or any(start >= after for (start, _), (after, _) in pairwise(pairs)):
            raise ValueError(
                f"accumulation_steps is {accumulation_steps!r}; accepted: a number, or pairs (iteration, number) whose "
                "iterations start with 0 and grow, such as [(0, 1), (1000, 4)]"
            )
        steps = [check_period("accumulation_steps", number, minimum=1) for _, number in pairs]
        self.accumulation_steps, self.schedule = steps[0], pairs if len(pairs) > 1 else []
        self.loader = loader
        self.before_pass: Callable[[Fraction], None] | None = None
        self._prefetcher = Prefetcher()

    @property
    def loader(self) -> Iterable[Any]:
        """The loader; it can be replaced at any time. Batches that the old loader has loaded ahead are dropped."""
        return self._loader

    @loader.setter
    def loader(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    def reset(self, data_loader_builder: Callable[[], Iterable[Any]]) -> None:
        """Replace the loader; the old one and its workers end before the new one is built.

        The new loader starts at its own position: to keep the position, give it the ``state_dict`` of the old one.
        """
        self.loader = ()
        self.loader = data_loader_builder()

    @property
    def iterator(self) -> Iterator[Any]:
        """The iterator of the loader, created at the first use: a trainer that only evaluates starts no workers."""
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return self._iterator

    def next(self, device: torch.device, iter: int) -> list[Any]:
        """The micro-batches of the iteration, on ``device``; if the loader ends, the next pass continues.

        There are fewer micro-batches only if the loader is an iterator that ends.

        Raises:
            ValueError: the loader yields no batch.
        """
        for start, steps in self.schedule:
            if start <= iter:
                self.accumulation_steps = steps
        batches: list[Any] = []
        while len(batches) < self.accumulation_steps and (batch := self._draw(len(batches))) is not _END:
            batches.append(batch)
        if not batches:
            raise ValueError(
                f"the data loader ({type(self._loader).__name__}) "
                + ("is an iterator that has ended" if isinstance(self._loader, Iterator) else "yields no batch")
                + "; give a loader that can be iterated again and has at least one batch (is the dataset smaller than "
                "a batch, with drop_last?)"
            )
        if device.type != "cpu":
            batches = self._prefetcher.move(batches, device)
        return batches

    def _draw(self, drawn: int) -> Any:
        batch = next_batch(self.iterator, _END)
        if batch is _END:
            self._iterator = None  # ends its workers
            if self.before_pass is not None:
                self.before_pass(Fraction(drawn, self.accumulation_steps))
            batch = next_batch(self.iterator, _END)
        return batch

    @property
    def iters_per_epoch(self) -> int:
        """Iterations per pass over the data, from the length of the loader or its dataset.

        Raises:
            ValueError: the data has no length, or the number of micro-batches changes.
        """
        if self.schedule:
            raise ValueError("accumulation_steps has a schedule, so there are no epochs; use iterations")
        batches = iters_per_epoch(self._loader)
        if batches is None:
            raise ValueError(
                f"the training data ({type(self._loader).__name__}) is a stream without a length, so there are no "
                "epochs; use iterations"
            )
        return whole_or_rounded(Fraction(exact(batches)) / self.accumulation_steps)

    @property
    def obstacle(self) -> str:
        """The reason why a resumed run does not continue at its position in the data; empty if it does."""
        return resume_obstacle(self._loader)

    def explain(self, error: Exception, batch: Any) -> None:
        """Raise a clearer error if a loader worker has ended; add a note if the model may not take such a batch."""
        if isinstance(error, RuntimeError) and hasattr(self._loader, "explain"):
            self._loader.explain(error)
        batch = batch[0] if self.accumulation_steps > 1 and batch else batch
        kind = type(batch).__name__
        if isinstance(batch, list | tuple | Mapping) and (kind in str(error) or not str(error)):
            getattr(error, "add_note", logger.error)(
                f"The model was called with one argument, the batch, a {kind}; if it takes tensors and returns logits, "
                "give trainkit.modeling.losses_from(model, loss_fn) to the trainer, see docs/bring_your_model.md",
            )

    def state_dict(self) -> dict[str, Any]:
        """The position in the data after the batches given so far; empty if the loader does not support it."""
        return {} if self.obstacle else self._loader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the loader continue at this position; batches that it has loaded ahead are dropped."""
        self._iterator = None
        obstacle = self.obstacle
        if state_dict and not obstacle:
            self._loader.load_state_dict(state_dict)  # type: ignore[attr-defined]
        elif state_dict or not obstacle:
            logger.warning("The data start again: %s", obstacle or "their position is not in the checkpoint")
