"""Running averages of weights."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from trainkit.utils.periods import is_number, is_whole
from trainkit.utils.plugins import load_plugin

AveragingKind: TypeAlias = Literal["exponential", "annealing", "warmup", "mean", "mmcv"]

_GAMMA = {"annealing": 100.0, "warmup": 2000.0, "mmcv": 100.0}


def averaging_rule(
    kind: AveragingKind = "exponential", decay: float | None = None, gamma: float | None = None, interval: int = 1
) -> Callable[[int], float]:
    """The weight of the new values in an average, ``average += weight * (new - average)``.

    The first update copies. Later, only each ``interval``-th update changes the average, but all count as steps.
    With ``m = 1 - decay`` (momentum in OpenMMLab) and ``steps`` updates before this one, the weight is

    - "exponential": ``m``;
    - "annealing": ``max(m, gamma / (gamma + steps))``, OpenMMLab's ``MomentumAnnealingEMA``;
    - "warmup": ``m + (1 - m) * exp(-(1 + steps) / gamma)``, mmdet's ``ExpMomentumEMA``;
    - "mean": ``1 / (1 + steps // interval)``, the plain mean: SWA, https://arxiv.org/abs/1803.05407;
    - "mmcv": ``min(m ** interval, (1 + steps) / (gamma + steps))``, as in mmcv 1.x, where ``gamma`` is ``warm_up``.
      With a usual ``m`` this is not a warm-up; for a warm-up use "warmup" or "annealing".

    Args:
        decay: weight of the old average, from 0 to below 1; default is 0.999. Not for "mean".
        gamma: about the number of updates that the start lasts; default is 2000 for "warmup" and 100 for "annealing"
            and "mmcv". Not for the other kinds.

    Returns:
        A function from ``steps`` to the weight: 1 copies the new values, 0 keeps the average.

    Raises:
        ValueError: an argument is not accepted.
    """
    if kind not in get_args(AveragingKind):
        raise ValueError(f"kind must be one of {', '.join(get_args(AveragingKind))}; got {kind!r}")
    if (decay is not None and kind == "mean") or (gamma is not None and kind not in _GAMMA):
        raise ValueError(f'kind "{kind}" does not use both: got decay {decay!r} and gamma {gamma!r}')
    if not is_whole(interval, 1):
        raise ValueError(f"interval must be a whole number of updates >= 1, got {interval!r}")
    decay, scale = 0.999 if decay is None else decay, _GAMMA.get(kind, 1.0) if gamma is None else gamma
    if not is_number(decay) or not 0 <= decay < 1:
        raise ValueError(f"decay (1 - momentum) must be a number from 0 to below 1, got {decay!r}")
    if not is_number(scale) or not 0 < scale < math.inf:
        raise ValueError(f"gamma must be a number of updates > 0, got {scale!r}")
    m = 1 - decay
    later: dict[str, Callable[[int], float]] = {
        "exponential": lambda steps: m,
        "annealing": lambda steps: max(m, scale / (scale + steps)),
        "warmup": lambda steps: (1 - m) * math.exp(-(1 + steps) / scale) + m,
        "mean": lambda steps: 1 / (steps // interval + 1),
        "mmcv": lambda steps: min(m**interval, (1 + steps) / (scale + steps)),
    }
    return lambda steps: 1.0 if steps == 0 else 0.0 if steps % interval else later[kind](steps)


class ModelAverage:
    """A running average of ``model``, in a copy of it; of a sharded model each rank averages its shards.

    Parameters are averaged; buffers are averaged if ``average_buffers``, else copied. Tensors that are not
    floating-point are copied. Non-persistent buffers of the copy are never changed. Nothing waits for the device.

    Attributes:
        module: the copy, in eval mode; its tensors are the average, with the ``requires_grad`` of the model, so that an
            evaluation of losses knows which are minimized. For a sharded model, which cannot be copied, this is the
            model itself, and it holds the average only inside ``standing_in``.
        stands_in: whether a sharded model holds the average now.
        steps: number of updates so far.

    Raises:
        TypeError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, rule: Callable[[int], float], *, average_buffers: bool = False) -> None:
        self._shards: dict[str, Tensor] = {}  # for a sharded model: name -> average
        if not any(hasattr(parameter, "to_local") for parameter in model.parameters()):
            try:
                self.module = copy.deepcopy(model).eval()
            except Exception as error:  # __deepcopy__ of the model may raise anything
                reason = f"{type(error).__name__}: {error}"
                raise TypeError(f"{type(model).__name__} must allow copy.deepcopy for an EMAHook ({reason})") from error
            averages = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        else:
            _sharding().release_gathered(model)
            self.module = model
            # keep_vars: a tensor that modules share gets one average
            own = model.state_dict(keep_vars=True)
            once = {id(tensor): tensor.detach().clone() for tensor in own.values()}
            averages = self._shards = {name: once[id(tensor)] for name, tensor in own.items()}
        self.stands_in = False
        self.steps = 0
        self._rule = rule
        # (averages, sources): one foreach call for all tensors of one device and dtype
        self._groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for name, source in model.named_parameters():
            self._add(averages[name], source.detach(), True)
        self._buffers: list[tuple[list[Tensor], int, dict[str, Any], str]] = []
        for path, buffer in model.named_buffers():
            owner_path, _, name = path.rpartition(".")
            owner = model.get_submodule(owner_path)
            if name not in owner._non_persistent_buffers_set:
                sources = self._add(averages[path], buffer, average_buffers)
                self._buffers.append((sources, len(sources) - 1, owner._buffers, name))

    def update(self) -> None:
        """Update the average with the model's current weights."""
        weight = self._rule(self.steps)
        self.steps += 1
        self._move(weight)

    def copy(self) -> None:
        """Copy the tensors that are not averaged again."""
        self._move(0)

    def restart(self) -> None:
        """Make the average a copy of the model's current weights, with 0 updates."""
        self.steps = 0
        self._move(1)

    def state_dict(self) -> dict[str, Any]:
        """The averaged tensors, under the names of the model's state dict."""
        return self._shards or self.module.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load an average; the model that it comes from may have other shards, or none."""
        if not self._shards:
            self.module.load_state_dict(state_dict, strict=False)
        for name, average in self._shards.items():
            _local_part(average).copy_(_local_part(_sharding().shard_like(state_dict[name], average)))

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Context in which ``module`` holds the average; changes only a sharded model. Every rank enters it."""
        if not self._shards:
            yield
            return
        _sharding().release_gathered(self.module)
        with torch.no_grad():
            own = [_local_part(tensor) for tensor in self.module.state_dict().values()]
            former = [tensor.clone() for tensor in own]
            torch._foreach_copy_(own, [_local_part(average) for average in self._shards.values()])
            self.stands_in = True
            try:
                yield
            finally:
                _sharding().release_gathered(self.module)
                torch._foreach_copy_(own, former)
                self.stands_in = False

    def _add(self, average: Tensor, source: Tensor, averaged: bool) -> list[Tensor]:
        averaged = averaged and (average.is_floating_point() or average.is_complex())
        averages, sources = self._groups.setdefault((averaged, average.device, average.dtype), ([], []))
        averages.append(_local_part(average))
        sources.append(_local_part(source))
        return sources

    @torch.no_grad()
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
