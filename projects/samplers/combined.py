"""Several training loaders as one, and batches of samples of the same group."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.utils.data import Sampler

from trainkit.data.epochs import epoch_listeners
from trainkit.data.protocol import batches_per_epoch, resume_obstacle
from trainkit.data.samplers import InfiniteSampler
from trainkit.utils.periods import check_period

logger = logging.getLogger(__name__)


class CombinedLoader:
    """The batches of several loaders, without end: a loader that ends is iterated again.

    A sampler or a dataset with ``set_epoch(epoch)`` is told the number of the pass over its own loader. The position
    can be saved if the positions of all loaders can be saved.

    Args:
        loaders: name -> loader, each with its own dataset and batch size.
        mode: "round_robin": one batch of each loader in turn. "each": a batch is a dict, name -> batch of that loader.
        epoch: an epoch is one pass over the data of the loader with the most batches ("max_cycle"), or with the fewest
            ("min").
    """

    def __init__(
        self,
        loaders: Mapping[str, Iterable[Any]],
        mode: Literal["round_robin", "each"] = "round_robin",
        epoch: Literal["max_cycle", "min"] = "max_cycle",
    ) -> None:
        is_known = mode in ("round_robin", "each") and epoch in ("max_cycle", "min")
        if not loaders or not is_known:
            raise ValueError(
                'CombinedLoader needs at least one loader, mode "round_robin" or "each", and epoch '
                f'"max_cycle" or "min"; got {[*loaders]}, {mode!r} and {epoch!r}'
            )
        self.loaders = dict(loaders)
        self._mode = mode
        self._epoch = epoch
        self._turn = 0  # "round_robin": the index of the next loader
        self._passes = dict.fromkeys(self.loaders, 0)  # those that have ended

    epoch_listeners: Sequence[Any] = ()  # each loader has its own epochs

    @property
    def batches_per_epoch(self) -> Fraction | None:
        """None if a loader has no known length."""
        lengths = []
        for loader in self.loaders.values():
            length = batches_per_epoch(loader)
            if length is None:
                return None
            lengths.append(Fraction(length))
        batches = max(lengths) if self._epoch == "max_cycle" else min(lengths)
        return batches * len(lengths) if self._mode == "round_robin" else batches

    @property
    def resume_obstacle(self) -> str:
        """See `trainkit.data.resume_obstacle`."""
        for loader in self.loaders.values():
            obstacle = resume_obstacle(loader)
            if obstacle:
                return obstacle
        return ""

    def state_dict(self) -> dict[str, Any]:
        states = {name: loader.state_dict() for name, loader in self.loaders.items()}  # type: ignore[attr-defined]
        return {
            "loaders": states,
            "mode": self._mode,
            "turn": self._turn,
            "passes": dict(self._passes),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at this position with the next ``iter()``; if names or mode differ, warn and start again."""
        has_same_mode = state.get("mode") == self._mode
        has_same_loaders = [*state["loaders"]] == [*self.loaders]
        if not has_same_mode or not has_same_loaders:
            logger.warning(
                "The checkpoint's data are not from the loaders %s; they start again",
                [*self.loaders],
            )
            return
        self._turn = state["turn"]
        self._passes.update(state["passes"])
        for name, loader in self.loaders.items():
            loader.load_state_dict(state["loaders"][name])  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        iterators = {}
        for name, loader in self.loaders.items():
            iterators[name] = self._endless(name, self._start_pass(loader, self._passes[name]))
        return self._draw(iterators)

    def _endless(self, name: str, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``, then those of new passes over the loader of this name."""
        loader = self.loaders[name]
        while True:
            yield from batches
            self._passes[name] += 1
            batches = self._start_pass(loader, self._passes[name])
            try:
                yield next(batches)
            except StopIteration:
                raise ValueError(
                    f"the loader {name!r} of a CombinedLoader yields no batch; has it ended?"
                ) from None

    @staticmethod
    def _start_pass(loader: Iterable[Any], epoch: int) -> Iterator[Any]:
        for listener in epoch_listeners(loader):
            listener.set_epoch(epoch)
        return iter(loader)

    def _draw(self, iterators: dict[str, Iterator[Any]]) -> Iterator[Any]:
        while True:
            if self._mode == "each":
                yield {name: next(iterator) for name, iterator in iterators.items()}
            else:
                in_turn = [*iterators.values()][self._turn]
                batch = next(in_turn)
                self._turn = (self._turn + 1) % len(iterators)
                yield batch


class GroupedBatchSampler(Sampler[list[int]]):
    """Batches whose samples are of one group, yielded in the order in which they become full.

    When a finite sampler ends, samples of batches that are not full are left out. Only with an `InfiniteSampler` there
    is a state. A resumed loader draws all indices again, without loading. ``group_ids`` holds the group of each sample,
    ``batch_size`` is that of this rank.
    """

    def __init__(
        self,
        sampler: Sampler[int],
        group_ids: Sequence[int] | np.ndarray | torch.Tensor,
        batch_size: int,
    ) -> None:
        self.sampler = cast(Any, sampler)
        self.batch_size = check_period("batch_size", batch_size, minimum=1)
        self._group_ids: list[int] = np.asarray(group_ids).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        open_batches: dict[int, list[int]] = {}
        for index in self.sampler:
            group = self._group_ids[index]
            batch = open_batches.setdefault(group, [])
            batch.append(index)
            if len(batch) == self.batch_size:
                del open_batches[group]
                yield batch

    @property
    def resume_obstacle(self) -> str:
        """See `trainkit.data.resume_obstacle`."""
        if isinstance(self.sampler, InfiniteSampler):
            return ""
        name = type(self.sampler).__name__
        return f"GroupedBatchSampler has no position in a {name}; use an endless sampler"

    def state_dict(self) -> dict[str, Any]:
        """The position; empty if there is a `resume_obstacle`."""
        if self.resume_obstacle:
            return {}
        return {"sampler": self.sampler.state_dict(), "world_size": self.sampler.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        saved = state["world_size"]
        own = self.sampler.world_size
        if saved != own:
            text = (
                "The batches of %d ranks cannot be divided among %d; some samples may be "
                "repeated or left out"
            )
            logger.warning(text, saved, own)
