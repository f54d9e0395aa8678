"""The order of the batches of a loader: what is drawn next, and the position that a checkpoint holds."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch.utils import data

from trainkit.data.samplers import InferenceSampler, InfiniteSampler
from trainkit.data.seeding import splitmix64
from trainkit.utils import comm
from trainkit.utils.periods import check_period

NOT_TOLD = -1
"""The epoch, if nobody has said which one it is."""


class Delivered(NamedTuple):
    """What a batch adds to the progress of its pass: the values after it, and the indices of its samples."""

    position: int
    num_batches: int
    indices: list[Any]


class Draw(NamedTuple):
    """A batch to load. There are 64 random bits for each sample, or for none; epochs likewise."""

    bits: list[int]
    epochs: list[int]
    delivered: Delivered


@dataclass
class Progress:
    """What a pass has delivered: samples of the stream, counted from the start of the run, and batches.

    ``epoch`` is what a dataset is told, if the sampler does not know the epoch.
    """

    position: int = 0
    num_batches: int = 0
    epoch: int = NOT_TOLD


class Order(data.Sampler[Draw]):
    """Draws the batches of a pass, from where it stands.

    Args:
        batches: the batch sampler of the loader; None if it has none.
        seed: for the bits of the samples; an `InfiniteSampler` has its own instead.

    Attributes:
        source: decides the order of the samples, so it has the state: the sampler, or a batch sampler of another class
            than torch's.
        endless: the `InfiniteSampler` of the loader, or None.
        is_test: whether the sampler is an `InferenceSampler`.
        seeds_samples, tells_epochs: whether a `Draw` has bits, and epochs.
        epoch: of the passes that start from now on, if the sampler does not know it.
    """

    def __init__(self, batches: Any, seed: int) -> None:
        sampler: Any = getattr(batches, "sampler", None)
        self.rank = comm.get_data_rank()
        self.world_size = comm.get_data_world_size()
        self.source: Any = sampler if type(batches) is data.BatchSampler else batches
        self.endless: Any = sampler if isinstance(sampler, InfiniteSampler) else None
        self.is_test = isinstance(sampler, InferenceSampler)
        self.seeds_samples = False
        self.tells_epochs = False
        self.epoch = NOT_TOLD
        self._batches = batches
        self._own_seed = seed
        self._source_at_start: Any = None  # the state of the source before the pass
        self._progress: Progress | None = None  # None: no pass has started
        self._is_loaded = False  # whether the next pass continues a loaded one

    @property
    def seed(self) -> int:
        return self._own_seed if self.endless is None else int(self.endless.seed)

    @property
    def _finds_position(self) -> bool:
        """Whether the source can start anywhere; others draw the indices of a pass again."""
        return self.endless is not None and self.source is self.endless

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        progress = self._progress or self.start_pass()
        if self._finds_position:
            return {
                "position": progress.position,
                "order": self.source.state_dict(progress.position),
            }
        return {
            "position": progress.position,
            "order": self._source_at_start,
            "batches": progress.num_batches,
            "epoch": progress.epoch,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        progress = Progress(
            check_period("position", state["position"]),
            check_period("batches", state.get("batches", 0)),
            check_period("epoch", state.get("epoch", NOT_TOLD), minimum=NOT_TOLD),
        )
        self._own_seed = check_period("seed", state["seed"])
        self.source.load_state_dict(copy.deepcopy(state["order"]))
        self._source_at_start = state["order"]
        self._is_loaded = True
        self._progress = progress

    def start_pass(self) -> Progress:
        """Start a pass: after loading a state where it says, else where the source goes on."""
        if self._finds_position:
            self._progress = Progress(self.endless.start)
        elif self._progress is None or not self._is_loaded:
            position = 0 if self._progress is None else self._progress.position
            self._progress = Progress(position, epoch=self.epoch)
            self._source_at_start = None
            if hasattr(self.source, "state_dict"):
                self._source_at_start = copy.deepcopy(self.source.state_dict())
        self._is_loaded = False
        return self._progress

    # ------------------------------------------------------------------ drawing

    def __iter__(self) -> Iterator[Draw]:
        progress = self._progress or self.start_pass()
        position = 0 if self.is_test else progress.position
        return self._draw(position, progress.num_batches, progress.epoch)

    def _draw(self, position: int, num_batches: int, epoch: int) -> Iterator[Draw]:
        """The batches of the pass after the first ``num_batches``, which start at ``position``."""
        ranks = self.endless or self
        key = splitmix64(self.seed, 0)
        # of a copy: a sampler may remember where it has looked last, and the position that is saved is behind
        located = copy.copy(self.endless) if self.tells_epochs else None
        for drawn in islice(self._batches, num_batches, None):
            indices = list(drawn)
            places = []  # of the samples in the stream of all ranks
            for i in range(len(indices)):
                places.append(position + ranks.rank + i * ranks.world_size)
            bits: list[int] = []
            if self.seeds_samples:
                bits = [splitmix64(key, place) for place in places]
            epochs: list[int] = []
            if located is not None:
                epochs = [located.locate(place)[0] for place in places]
            elif self.tells_epochs and epoch != NOT_TOLD:
                epochs = [epoch] * len(indices)
            position += len(indices) * ranks.world_size
            num_batches += 1
            yield Draw(bits, epochs, Delivered(position, num_batches, indices))
