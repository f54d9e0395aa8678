"""The order of the batches of a loader, and the position that a checkpoint holds.

A batch is drawn before it is delivered: workers load ahead. So there are two counts. `Order` counts
what is drawn, in local variables. `Progress` counts what is delivered, and a checkpoint has this.
A `Draw` therefore takes with it the counts after its batch, `Delivered`; they come back with the
batch, and the loader writes them into the `Progress` of the pass.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
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
    """The progress of a pass after a batch, and the indices of the samples in the batch."""

    position: int
    num_batches: int
    indices: list[Any]


class Draw(NamedTuple):
    """A batch to load."""

    bits: list[int]  # 64 random bits for each sample; [] if its samples need none
    epochs: list[int]  # the epoch of each sample; [] if nobody is told
    delivered: Delivered


@dataclass
class Progress:
    """What a pass has delivered: batches, and samples of the stream since the start of the run.

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
        source: decides the order of the samples, so it has the state: the sampler, or a batch
            sampler of another class than torch's.
        endless: the `InfiniteSampler` of the loader, or None.
        is_test: whether the sampler is an `InferenceSampler`.
        seeds_samples, tells_epochs: whether a `Draw` has bits, and epochs.
        epoch: of the passes that start from now on, if the sampler does not know it.
    """

    def __init__(self, batches: Any, seed: int) -> None:
        sampler: Any = getattr(batches, "sampler", None)
        self.source: Any = batches
        if type(batches) is data.BatchSampler:
            self.source = sampler
        self.endless: InfiniteSampler | None = None
        if isinstance(sampler, InfiniteSampler):
            self.endless = sampler
        self.rank = comm.get_data_rank()
        self.world_size = comm.get_data_world_size()
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
        """For the bits of the samples."""
        if self.endless is None:
            return self._own_seed
        return int(self.endless.seed)

    @property
    def _can_start_anywhere(self) -> bool:
        """Whether the source goes to a position at once; others draw a pass again up to it."""
        return self.endless is not None and self.source is self.endless

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The position after the delivered batches of the present pass."""
        progress = self._present_pass()
        if self._can_start_anywhere:
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
        """The next pass continues after the batches that are in this state."""
        progress = Progress(
            position=check_period("position", state["position"]),
            num_batches=check_period("batches", state.get("batches", 0)),
            epoch=check_period("epoch", state.get("epoch", NOT_TOLD), minimum=NOT_TOLD),
        )
        self._own_seed = check_period("seed", state["seed"])
        self.source.load_state_dict(copy.deepcopy(state["order"]))
        self._source_at_start = state["order"]
        self._is_loaded = True
        self._progress = progress

    def start_pass(self) -> Progress:
        """Start a pass: after loading a state where it says, else where the source goes on."""
        continues_loaded_pass = self._is_loaded
        self._is_loaded = False
        if self._can_start_anywhere:
            self._progress = Progress(self.source.start)
        elif self._progress is None or not continues_loaded_pass:
            position = 0 if self._progress is None else self._progress.position
            self._progress = Progress(position, epoch=self.epoch)
            self._source_at_start = None
            if hasattr(self.source, "state_dict"):
                self._source_at_start = copy.deepcopy(self.source.state_dict())
        return self._progress

    def _present_pass(self) -> Progress:
        if self._progress is None:
            return self.start_pass()
        return self._progress

    # ------------------------------------------------------------------ drawing

    def __iter__(self) -> Iterator[Draw]:
        progress = self._present_pass()
        position = 0 if self.is_test else progress.position
        return self._draw(position, progress.num_batches, progress.epoch)

    def _draw(self, position: int, num_batches: int, epoch: int) -> Iterator[Draw]:
        """The batches of the pass after the first ``num_batches``, which start at ``position``."""
        key = splitmix64(self.seed, 0)
        # A copy is asked for epochs: a sampler may remember where it has looked last, and what is
        # saved is the position after the delivered batches, which is an earlier one.
        knows_epochs = None
        if self.tells_epochs:
            knows_epochs = copy.copy(self.endless)
        rank, world_size = self._ranks()
        for drawn in islice(self._batches, num_batches, None):
            indices = list(drawn)
            # the places of these samples in the stream of all ranks, who take turns in it
            end = position + len(indices) * world_size
            places = range(position + rank, end + rank, world_size)
            bits: list[int] = []
            if self.seeds_samples:
                bits = [splitmix64(key, place) for place in places]
            epochs: list[int] = []
            if self.tells_epochs:
                epochs = _epochs_of(places, knows_epochs, epoch)
            position = end
            num_batches += 1
            yield Draw(bits, epochs, Delivered(position, num_batches, indices))

    def _ranks(self) -> tuple[int, int]:
        """(rank, world size) of the sampler, which a project may have changed; else of the run."""
        if self.endless is not None:
            return self.endless.rank, self.endless.world_size
        return self.rank, self.world_size


def _epochs_of(places: Sequence[int], endless: InfiniteSampler | None, epoch: int) -> list[int]:
    """The epoch of each sample: an endless sampler knows it; else ``epoch``, if it was told."""
    if endless is not None:
        epochs = []
        for place in places:
            epoch_of_place, _ = endless.locate(place)
            epochs.append(epoch_of_place)
        return epochs
    if epoch == NOT_TOLD:
        return []
    return [epoch] * len(places)
