"""Running averages of weights, and the hook that evaluates such an average."""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.checkpoint.errors import loading
from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.evaluation.observer import labelled
from trainkit.utils.device import unwrap_model
from trainkit.utils.periods import check_number, check_period, round_length
from trainkit.utils.plugins import load

AveragingKind: TypeAlias = Literal["exponential", "annealing", "warmup", "mean", "mmcv"]

AVERAGED_PATH = "trainer.hooks.EMAHook.model"  # of the average in the state of a file
# Entries of a file that was chosen by a score: which weights were scored, "ema" (its entry "model" is then the
# average) or "model"; and the weights for resuming, if they are others.
EVALUATED = "evaluated"
TRAINED = "trained_model"


def averaged_weights(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The average of the (first) `EMAHook` in the state of a file; None if there is none."""
    found: Any = state
    for key in AVERAGED_PATH.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def averaging_rule(
    kind: AveragingKind = "exponential",
    decay: float | None = None,
    gamma: float | None = None,
    interval: int = 1,
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
    if decay is not None:
        check_number("decay", decay, "[0, 1)")
    if gamma is not None:
        check_number("gamma", gamma, "(0, inf)")
    interval = round_length(check_period("interval", interval, minimum=1))
    m = 1 - (0.999 if decay is None else decay)
    if gamma is None:
        gamma = 2000.0 if kind == "warmup" else 100.0
    later: dict[str, Callable[[int], float]] = {
        "exponential": lambda steps: m,
        "annealing": lambda steps: max(m, gamma / (gamma + steps)),
        "warmup": lambda steps: (1 - m) * math.exp(-(1 + steps) / gamma) + m,
        "mean": lambda steps: 1 / (steps // interval + 1),
        "mmcv": lambda steps: min(m**interval, (1 + steps) / (gamma + steps)),
    }
    if kind not in later:
        raise ValueError(f"kind must be one of {', '.join(later)}, got {kind!r}")
    weight_later = later[kind]

    def rule(steps: int) -> float:
        if steps == 0:
            return 1.0
        if steps % interval != 0:
            return 0.0
        return weight_later(steps)

    return rule


class _BufferPlace(NamedTuple):
    """Where a buffer is: ``sources[number]``, and ``buffers[name]`` of its module."""

    sources: list[Tensor]
    number: int
    buffers: Mapping[str, Any]
    name: str


class ModelAverage:
    """A running average of the weights of ``model``; of a sharded model each rank averages its shards.

    Parameters are averaged; buffers are averaged if ``average_buffers``, else copied, unless they are not persistent.
    Tensors that are not floating-point are copied. An average of a 16-bit tensor is in float32: in 16 bits its updates
    would be rounded away. ``steps`` counts the updates. Nothing waits for the device.
    """

    is_held = False  # whether the model holds the average now

    def __init__(
        self, model: nn.Module, rule: Callable[[int], float], *, average_buffers: bool = False
    ) -> None:
        self.steps = 0
        self._model = model
        self._rule = rule
        self._is_sharded = any(hasattr(parameter, "to_local") for parameter in model.parameters())
        averaged = {id(parameter) for parameter in model.parameters()}
        if average_buffers:
            averaged |= {id(buffer) for buffer in model.buffers()}
        once: dict[int, Tensor] = {}  # modules may share a tensor
        self._averages: dict[str, Tensor] = {}
        for name, tensor in self._tensors().items():
            if id(tensor) not in once:
                own = tensor.detach().clone()
                if id(tensor) in averaged:
                    own = _widened(own)
                once[id(tensor)] = own
            self._averages[name] = once[id(tensor)]
        # (averages, sources): one foreach call for all tensors of one device and dtypes
        self._groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for name, source in model.named_parameters():
            self._add(self._averages[name], source.detach(), True)
        self._buffers: list[_BufferPlace] = []
        for path, buffer in model.named_buffers():
            if path in self._averages:
                sources = self._add(self._averages[path], buffer, average_buffers)
                owner, _, name = path.rpartition(".")
                buffers = model.get_submodule(owner)._buffers
                self._buffers.append(_BufferPlace(sources, len(sources) - 1, buffers, name))

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
            saved = state_dict[name]
            if self._is_sharded:
                saved = load("shard_like")(saved, average)
            saved = _local_part(saved)
            own = _local_part(average)
            if own.shape != saved.shape:  # copy_ would repeat a smaller one
                raise ValueError(f"{name!r} has shape {[*saved.shape]}, and here {[*own.shape]}")
            own.copy_(saved)

    @contextmanager
    def held(self, label: str = "") -> Iterator[nn.Module]:
        """Context in which the model holds the average, without its own weights; every rank enters it.

        Tables of results have the ``label`` there.
        """
        own = [_local_part(tensor.detach()) for tensor in self._tensors().values()]
        averages = [_local_part(average) for average in self._averages.values()]
        former = [tensor.clone() for tensor in own]
        torch._foreach_copy_(own, averages)
        self.is_held = True
        try:
            with labelled(label):
                yield self._model
        finally:
            self.is_held = False
            self._tensors()
            torch._foreach_copy_(own, former)

    def _tensors(self) -> dict[str, Tensor]:
        if self._is_sharded:
            load("release_gathered")(self._model)
        state = self._model.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def _add(self, average: Tensor, source: Tensor, averaged: bool) -> list[Tensor]:
        has_fractions = average.is_floating_point() or average.is_complex()
        key = (averaged and has_fractions, average.device, average.dtype, source.dtype)
        averages, sources = self._groups.setdefault(key, ([], []))
        averages.append(_local_part(average))
        sources.append(_local_part(source))
        return sources

    def _move(self, weight: float) -> None:
        """Move the averages to the model's values by ``weight``, from 0 to 1, and copy all other tensors."""
        for place in self._buffers:
            # a model may replace a buffer by a new tensor; parameters stay the same tensors
            place.sources[place.number] = place.buffers[place.name]
        for (averaged, _, dtype, source_dtype), (averages, sources) in self._groups.items():
            if weight == 1 or not averaged:
                torch._foreach_copy_(averages, sources)
            elif weight > 0:
                if dtype != source_dtype:
                    sources = [source.to(dtype) for source in sources]
                torch._foreach_lerp_(averages, sources, weight)


def _widened(tensor: Tensor) -> Tensor:
    """In float32, if it has fewer bits."""
    if tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize:
        return tensor.float()
    return tensor


def weight_of_start(rule: Callable[[int], float], num_updates: int) -> float:
    """The weight of the first weights in an average after ``num_updates`` updates; only exact above one half."""
    weight = 1.0
    for steps in range(1, num_updates):
        weight *= 1.0 - rule(steps)
        if weight <= 0.5:
            break
    return weight


def _local_part(tensor: Any) -> Any:
    """This rank's part of a sharded tensor, in the same memory; another tensor is returned as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


logger = logging.getLogger(__name__)


@contextmanager
def _labelled_raw(model: nn.Module) -> Iterator[nn.Module]:
    with labelled("raw"):
        yield model


@HOOK_REGISTRY.register()
class EMAHook(HookBase):
    """Average the weights over the iterations, and evaluate the average.

    A checkpoint holds the weights and the average; a best one has as ``model`` those that were scored. Every rank
    averages its own model: parameters are equal on all ranks, buffers may differ. In an evaluation the model itself
    holds the average, and saving is refused. Of several hooks, the first that is not raw is evaluated.

    Args:
        decay: weight of the old average in an update, default 0.999; ``1 - momentum`` in OpenMMLab. See
            `averaging_rule`, also for ``kind``, ``gamma`` and ``interval``.
        begin: the average starts with the weights after this many iterations (at least 1). Before that it equals the
            model.
        buffers: "copy" copies the model's buffers, "average" averages the floating-point ones.
        evaluate: which weights are evaluated: "ema" (the average), "raw" (the model's), or "both"; then the results of
            the model's weights are under "raw".
    """

    priority = 44  # after the update, before anything that evaluates or saves

    def __init__(
        self,
        decay: float | None = None,
        kind: AveragingKind = "exponential",
        *,
        gamma: float | None = None,
        interval: int = 1,
        begin: int = 0,
        buffers: Literal["copy", "average"] = "copy",
        evaluate: Literal["ema", "raw", "both"] = "ema",
    ) -> None:
        is_accepted = buffers in ("copy", "average") and evaluate in ("ema", "raw", "both")
        if not is_accepted:
            accepted = 'buffers must be "copy" or "average", and evaluate "ema", "raw" or "both"'
            raise ValueError(f"{accepted}; got {buffers!r} and {evaluate!r}")
        self._rule = averaging_rule(kind, decay, gamma, interval)
        self._begin = check_period("begin", begin)
        self._average_buffers = buffers == "average"
        self.evaluate = evaluate
        if evaluate == "raw":  # then this hook offers no other model
            self.evaluated_models = super().evaluated_models  # type: ignore[method-assign, assignment]
        self._was_evaluated = False  # whether an evaluation has used the average
        # whether its buffers are of its own weights, see `compute_statistics`
        self._has_own_statistics = False
        self._average: ModelAverage | None = None
        self._waiting_state: dict[str, Any] = {}

    def before_train(self) -> None:
        """Raises ConfigError if ``begin`` is after the end of the run."""
        # max_iter of this train() may be only a part of the run
        cfg = getattr(self.trainer, "cfg", None)
        end = self.trainer.max_iter
        if cfg is not None:
            end = max(end, cfg.SOLVER.MAX_ITER)
        if self._begin > end:
            raise ConfigError(
                f"begin of EMAHook is {self._begin}, but the run has only {end} iterations"
            )
        self._warn_of_a_heavy_start(end)
        self._name_other_statistics()
        done = self.trainer.start_iter
        if done == 0:
            self._has_own_statistics = False
        state = {} if done == 0 else self.state_dict()
        if not state and done >= max(self._begin, 1):
            logger.warning(
                "EMAHook has no average of the first %d iterations; it starts with the model", done
            )
        self._make_average(self.trainer.model, state)

    def _warn_of_a_heavy_start(self, end: int) -> None:
        num_updates = end - max(self._begin - 1, 0)
        if num_updates < 2:
            return
        weight = weight_of_start(self._rule, num_updates)
        if weight > 0.5:
            text = (
                "EMAHook: after its %d updates the weights with which the average starts are "
                "still %.0f %% of it; "
                "take a smaller decay, such as %.2g, or another kind"
            )
            # one whose start has a weight of 0.1 %
            smaller = 0.001 ** (1 / num_updates)
            logger.warning(text, num_updates, 100 * weight, smaller)

    def _name_other_statistics(self) -> None:
        if self.evaluate == "raw" or self._average_buffers:
            return
        if any(type(hook).__name__ == "PreciseBN" for hook in self.trainer.hooks):
            return
        num_layers = 0
        for layer in unwrap_model(self.trainer.model).modules():
            if isinstance(layer, _BatchNorm) and layer.training and layer.track_running_stats:
                num_layers += 1
        if num_layers > 0:
            text = (
                "EMAHook: %d batch norm layers have the statistics of the model's own "
                "weights, also where the average "
                "is evaluated; TEST.PRECISE_BN.ENABLED computes those of the average"
            )
            logger.info(text, num_layers)

    def after_step(self) -> None:
        assert self._average is not None
        self._has_own_statistics = False
        if self.trainer.iter + 1 < self._begin:
            self._average.restart()
        else:
            self._average.update()

    def copy_buffers(self) -> None:
        """Copy the model's buffers again, unless they are averaged: later hooks may have changed them."""
        if self._average is not None and not self._has_own_statistics:
            self._average.copy()

    def compute_statistics(self, compute: Callable[[], None]) -> None:
        """Call ``compute`` while the model holds the average; it has these buffers until its next update."""
        if self._average is None or self._average_buffers or self.evaluate == "raw":
            return
        self._average.copy()  # the other buffers
        with self._average.held():
            compute()
            self._average.copy()
        self._has_own_statistics = True

    def evaluated_models(self, model: nn.Module) -> dict[str, AbstractContextManager[nn.Module]]:
        """The average, and for "both" the model with the prefix "raw"; without an average only ``model``."""
        if self._waiting_state:  # without training, the average comes from the loaded checkpoint
            self._make_average(model, self._waiting_state)
        if self._average is None:
            logger.warning("EMAHook has no averaged weights, so those of the model are evaluated")
            return {"": nullcontext(model)}
        self.copy_buffers()
        self._was_evaluated = True
        models: dict[str, AbstractContextManager[nn.Module]] = {"": self._average.held(label="ema")}
        if self.evaluate == "both":
            models["raw"] = _labelled_raw(model)
        return models

    def before_save(self, state: dict[str, Any]) -> None:
        """Make the average the ``model`` of a best checkpoint that it was chosen for."""
        if self._average is not None and self._average.is_held:
            raise RuntimeError(
                "a model cannot be saved in the evaluation of its average; save in after_step"
            )
        if "best_of" not in state or not self._was_evaluated:
            return
        is_raw = self.evaluate == "both" and state["best_of"].startswith("raw/")
        if is_raw:
            state[EVALUATED] = "model"
            return
        state[EVALUATED] = "ema"
        logger.info("The best model has the averaged weights of EMAHook, which were evaluated")
        trained = state["model"]
        average = self.state_dict()["model"]
        scored = copy.copy(trained)  # copy keeps _metadata
        for name, value in trained.items():
            if name in average:  # in the precision in which it was scored
                scored[name] = average[name].to(value.dtype)
        state[TRAINED] = trained
        state["model"] = scored

    def _make_average(self, model: nn.Module, state: dict[str, Any]) -> None:
        average = ModelAverage(
            unwrap_model(model), self._rule, average_buffers=self._average_buffers
        )
        if state:
            with loading("the average of EMAHook in the checkpoint"):
                average.load_state_dict(state["model"])
            average.steps = state["steps"]
            self._has_own_statistics = state.get("has_own_statistics", False)
        self._average = average
        self._waiting_state = {}

    def state_dict(self) -> dict[str, Any]:
        """``model`` (the state of the average), and what was done with it; empty before the first run."""
        if self._waiting_state or self._average is None:
            return self._waiting_state
        self.copy_buffers()
        return {
            "model": self._average.state_dict(),
            "steps": self._average.steps,
            "was_evaluated": self._was_evaluated,
            "has_own_statistics": self._has_own_statistics,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            check_period("steps", state_dict["steps"])
            for name, value in state_dict["model"].items():
                if not isinstance(value, Tensor):
                    raise TypeError(f"model.{name} must be a tensor, got {value!r:.80}")
        self._was_evaluated = bool(state_dict.get("was_evaluated", False))
        self._waiting_state = dict(state_dict)
