"""Which batches a loader asks for, and which batches it has delivered."""

import copy
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler

from trainkit.data.samplers.infinite import InfiniteSampler

_MAX_REMEMBERED = 64  # number of delivered batches whose samples can be named


class Task(NamedTuple):
    """A batch: the position after it, its indices, the position of its first sample, the distance between samples."""

    after: int
    indices: Any
    first: int
    stride: int


class Owed(NamedTuple):
    """What is known about a batch until it is delivered: its indices; the state of the order and ``over`` after it."""

    indices: Any
    state: Any
    over: bool


@dataclass(eq=False)
class Tasks:
    """The tasks of the passes of one loader, and what was delivered of them.

    Attributes:
        batches: lists of indices.
        order: the object that decides the order of samples; None: its state is not needed.
        rank: of this process.
        position: number of samples of the stream in the delivered batches.
        passes: how often the next pass may iterate ``batches``. After loading a state that is ``over`` it is 0: the
            next pass is empty, like the rest of that pass in a run without a stop. Later it is 2: if a sampler makes an
            empty pass itself, this pass is left out.
        notes: two numbers that each worker (without workers: this process) writes: the position after the batch that it
            is loading, and how many of its samples are loaded. Empty if the loader does not fetch by task.
        over: whether the last delivered batch was not full and so ends this pass. Then a `BatchSampler` has exhausted
            its sampler, and the sampler's state belongs to the next pass.
        owed: position after a requested batch -> what is known about this batch.
        recent: indices of the last delivered batches.
    """

    batches: Any
    order: Any
    world_size: int
    rank: int
    position: int = 0
    passes: int = 1
    notes: MutableSequence[int] = field(default_factory=list)
    over: bool = field(init=False, default=False)
    owed: dict[int, Owed] = field(init=False, default_factory=dict)
    recent: list[Any] = field(init=False, default_factory=list)
    _started: bool = field(init=False, default=False)
    _state: Any = field(init=False, default=None)  # the state of the order after the delivered batches

    def state(self) -> dict[str, Any]:
        """The position, the state of the order at this position, and ``over`` if it is true."""
        if not self._started:
            self._start()
        endless = isinstance(self.order, InfiniteSampler)
        state = {"position": self.position, "order": self.order.state_dict(self.position) if endless else self._state}
        return {**state, "over": True} if self.over else state

    def delivered(self, position: int) -> None:
        """The batch that ends at this position was delivered."""
        self.position = position
        for after in [after for after in self.owed if after <= position]:  # includes batches that failed
            indices, self._state, self.over = self.owed.pop(after)
            self.recent.append(indices)
        del self.recent[:-_MAX_REMEMBERED]

    def __iter__(self) -> Iterator[Task]:
        self._start()
        self._started = True
        return self._draw()

    def _start(self) -> None:
        if self.order is None:
            self.position = 0  # each evaluation is the same, with the same random numbers
        elif isinstance(self.order, InfiniteSampler):
            self.position = self.order.start
        elif hasattr(self.order, "stream_start"):
            self.position = self.order.stream_start
        self.over = self.passes != 1
        self.owed.clear()
        self._state = self._order_state()

    def _draw(self) -> Iterator[Task]:
        passes, self.passes = self.passes, 1 if self.passes else 2
        start = position = self.position
        full = self.batches.batch_size if type(self.batches) is BatchSampler else 0
        for _ in range(passes):
            for indices in self.batches:
                first = position + self.rank
                position += len(indices) * self.world_size
                self.owed[position] = Owed(indices, self._order_state(), len(indices) < full)
                yield Task(position, indices, first, self.world_size)
            if position > start:
                return

    def _order_state(self) -> Any:
        # the state of an endless sampler is a function of the position
        is_needless = self.order is None or isinstance(self.order, InfiniteSampler)
        return None if is_needless else copy.deepcopy(self.order.state_dict())
