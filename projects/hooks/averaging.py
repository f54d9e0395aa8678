"""Running averages of weights."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from trainkit.utils.loading import load_plugin
from trainkit.utils.periods import is_whole

AveragingKind: TypeAlias = Literal["exponential", "annealing", "warmup", "mean", "mmcv"]

AVERAGED_PATH = "trainer.hooks.EMAHook.model"  # of the average in the state of a file
# Entries of a file that was chosen by a score: which weights were scored, "ema" (its entry "model" is then the
# average) or "model"; and the weights for resuming, if they are others.
EVALUATED, TRAINED = "evaluated", "trained_model"


def averaged_weights(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The average of the (first) `EMAHook` in the state of a file; None if there is none."""
    found: Any = state
    for key in AVERAGED_PATH.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def averaging_rule(
    kind: AveragingKind = "exponential", decay: float | None = None, gamma: float | None = None, interval: int = 1
) -> Callable[[int], float]:
    """The weight of the new values in an average, ``average += weight * (new - average)``.

    The first update copies. Later, only each ``interval``-th update changes the average, but all count as steps.
    With ``m = 1 - decay`` (momentum in OpenMMLab) and ``steps`` updates before this one, the weight is, as a function
    of ``steps``:

    - "exponential": ``m``;
    - "annealing": ``max(m, gamma / (gamma + steps))``, OpenMMLab's ``MomentumAnnealingEMA``;
    - "warmup": ``m + (1 - m) * exp(-(1 + steps) / gamma)``, mmdet's ``ExpMomentumEMA``;
    - "mean": ``1 / (1 + steps // interval)``, the plain mean: SWA, https://arxiv.org/abs/1803.05407;
    - "mmcv": ``min(m ** interval, (1 + steps) / (gamma + steps))``, as in mmcv 1.x, where ``gamma`` is ``warm_up``.

    ``decay``: weight of the old average, from 0 to below 1; default is 0.999. Not for "mean". ``gamma``: about the
    number of updates that the start lasts; default is 2000 for "warmup", 100 for the others.
    """
    m = 1 - (0.999 if decay is None else decay)
    scale = gamma if gamma is not None else 2000.0 if kind == "warmup" else 100.0
    later: dict[str, Callable[[int], float]] = {
        "exponential": lambda steps: m,
        "annealing": lambda steps: max(m, scale / (scale + steps)),
        "warmup": lambda steps: (1 - m) * math.exp(-(1 + steps) / scale) + m,
        "mean": lambda steps: 1 / (steps // interval + 1),
        "mmcv": lambda steps: min(m**interval, (1 + steps) / (scale + steps)),
    }
    if kind not in later or not is_whole(interval, 1) or not 0 < m <= 1 or not 0 < scale < math.inf:
        accepted = f"kind must be one of {', '.join(later)}, decay in [0, 1), gamma > 0, interval an int >= 1"
        raise ValueError(f"{accepted}; got {kind!r}, {decay!r}, {gamma!r} and {interval!r}")
    return lambda steps: 1.0 if steps == 0 else 0.0 if steps % interval else later[kind](steps)


class ModelAverage:
    """A running average of the weights of ``model``; of a sharded model each rank averages its shards.

    Parameters are averaged; buffers are averaged if ``average_buffers``, else copied, unless they are not persistent.
    Tensors that are not floating-point are copied. ``steps`` counts the updates. Nothing waits for the device.
    """

    is_held = False  # whether the model holds the average now

    def __init__(self, model: nn.Module, rule: Callable[[int], float], *, average_buffers: bool = False) -> None:
        self.steps, self._model, self._rule = 0, model, rule
        self._is_sharded = any(hasattr(parameter, "to_local") for parameter in model.parameters())
        own = self._tensors()
        once = {id(tensor): tensor.detach().clone() for tensor in own.values()}  # modules may share a tensor
        self._averages = {name: once[id(tensor)] for name, tensor in own.items()}
        # (averages, sources): one foreach call for all tensors of one device and dtype
        self._groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for name, source in model.named_parameters():
            self._add(self._averages[name], source.detach(), True)
        self._buffers: list[tuple[list[Tensor], int, dict[str, Any], str]] = []
        for path, buffer in model.named_buffers():
            if path in self._averages:
                sources = self._add(self._averages[path], buffer, average_buffers)
                owner, _, name = path.rpartition(".")
                self._buffers.append((sources, len(sources) - 1, model.get_submodule(owner)._buffers, name))

    def update(self) -> None:
        """Update the average with the model's current weights."""
        self._move(self._rule(self.steps))
        self.steps += 1

    def copy(self) -> None:
        """Copy the tensors that are not averaged again."""
        self._move(0)

    def restart(self) -> None:
        """Make the average a copy of the model's current weights, with 0 updates."""
        self.steps = 0
        self._move(1)

    def state_dict(self) -> dict[str, Any]:
        return self._averages

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load an average; the model that it comes from may have other shards, or none."""
        for name, average in self._averages.items():
            saved = _sharding().shard_like(state_dict[name], average) if self._is_sharded else state_dict[name]
            _local_part(average).copy_(_local_part(saved))

    @contextmanager
    def held(self) -> Iterator[nn.Module]:
        """Context in which the model holds the average, without its own weights; every rank enters it."""
        own = [_local_part(tensor.detach()) for tensor in self._tensors().values()]
        former = [tensor.clone() for tensor in own]
        torch._foreach_copy_(own, [_local_part(average) for average in self._averages.values()])
        self.is_held = True
        try:
            yield self._model
        finally:
            self.is_held = False
            self._tensors()
            torch._foreach_copy_(own, former)

    def _tensors(self) -> dict[str, Tensor]:
        if self._is_sharded:
            _sharding().release_gathered(self._model)
        state = self._model.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def _add(self, average: Tensor, source: Tensor, averaged: bool) -> list[Tensor]:
        averaged = averaged and (average.is_floating_point() or average.is_complex())
        averages, sources = self._groups.setdefault((averaged, average.device, average.dtype), ([], []))
        averages.append(_local_part(average))
        sources.append(_local_part(source))
        return sources

    def _move(self, weight: float) -> None:
        """Move the averages to the model's values by ``weight``, from 0 to 1, and copy all other tensors."""
        for sources, i, buffers, name in self._buffers:
            sources[i] = buffers[name]  # a model may replace a buffer by a new tensor; parameters stay the same tensors
        for (averaged, _, _), (averages, sources) in self._groups.items():
            if weight == 1 or not averaged:
                torch._foreach_copy_(averages, sources)
            elif weight > 0:
                torch._foreach_lerp_(averages, sources, weight)


def _sharding() -> Any:
    return load_plugin("trainkit.projects.sharding.tensors")


def _local_part(tensor: Any) -> Any:
    """This rank's part of a sharded tensor, in the same memory; another tensor is returned as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
