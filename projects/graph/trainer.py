"""The step as a CUDA graph: it is recorded once and replayed."""

import copy
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trainkit.projects.graph.recorder import ADVICE, CudaRecorder, check_recordable, describe

from trainkit.config import CfgNode
from trainkit.engine.amp import AMPTrainer
from trainkit.engine.defaults.build import TRAINER_REGISTRY, make_step_trainer
from trainkit.engine.losses import Losses
from trainkit.engine.step import SimpleTrainer, parameters_of
from trainkit.utils.events import EventStorage

logger = logging.getLogger(__name__)

# ordinary steps per signature: optimizers create their state, libraries choose their kernels
WARM_UP_ITERS = 3
MAX_RECORDINGS = 8  # each holds the memory of a backward pass, with gradients
_REQUIRES_GRAD = attrgetter("requires_grad")
_TRAINING = itemgetter("training")
_MAX_SIGNATURES = 100  # limit of signatures that are counted


@dataclass
class _Recording:
    """A recorded step for batches of one signature.

    Attributes:
        inputs: the tensors from which the recording reads batches.
        replays: name of a part -> a call that replays this part and the following parts, up to the next name.
        gradients: (parameter, gradient) of each of the optimizer's parameters.
        losses: those of the last replay.
    """

    inputs: list[Tensor]
    replays: dict[str, Callable[[], None]] = field(default_factory=dict)
    gradients: list[tuple[Tensor, Tensor | None]] = field(init=False)
    losses: "_RecordedLosses" = field(init=False)


class GraphTrainer(SimpleTrainer):
    """`SimpleTrainer` with a step that costs the host almost nothing: the same hooks, checkpoints and numbers.

    On CUDA the first `WARM_UP_ITERS` iterations with inputs of one signature (shapes, types, and all values in a batch
    that are not tensors) are ordinary steps. Then everything from the forward pass to the update is recorded, and later
    iterations replay it. At most `MAX_RECORDINGS` signatures are recorded; others stay ordinary steps. The recording is
    divided where the host must act: for hooks that override ``after_backward``. On other devices, all steps are
    ordinary.

    A replay repeats work of the device, but no Python. The model's work on the host is not repeated; a number that a
    hook changes in the model keeps its old value; the steps of a model that waits for the device stay ordinary. The
    learning rate may change at each step. If another setting of the optimizer, ``requires_grad``, the mode of a module
    or a hook changes, steps are recorded again. The next iteration overwrites ``losses`` and the gradients.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError: the step cannot be recorded (several processes, or an optimizer that needs the host)."""
        super().__init__(*args, **kwargs)
        self._recorder = self.make_recorder()
        # the recording of this step; None: an ordinary step
        self._recording: _Recording | None = None
        # None: the step cannot be recorded
        self._recordings: dict[Hashable, _Recording | None] = {}
        # number of batches per signature that is not recorded yet
        self._seen: dict[Hashable, int] = {}
        # the recording whose gradients the parameters have now
        self._shown: _Recording | None = None
        self._in_step = False  # True after a step that has failed
        self._given: Sequence[Any] = ()  # the micro-batches of this step
        # where the last ordinary step before a recording waits for the device
        self._waits: list[str] | None = None
        self._newest: Hashable = None
        self._warned_of: set[str] = set()
        if self._recorder is None:
            logger.warning(
                "Steps are recorded only on CUDA; on %s they are ordinary", self._device.type
            )
        else:
            check_recordable(self.optimizer)
            self.forget_recordings()

    def make_recorder(self) -> CudaRecorder | None:
        """None: all steps are ordinary."""
        return CudaRecorder(self._device) if self._device.type == "cuda" else None

    # ------------------------------------------------------------------ the parts of a step

    def micro_batches(self) -> Iterator[tuple[Any, bool]]:
        """Those that are recorded or drawn already."""
        for number, batch in enumerate(self._given, 1):
            yield batch, number == len(self._given)
        if not self._given:
            yield from super().micro_batches()

    def draw(self) -> Any:
        return self._given[0] if self._given else super().draw()

    def compute_gradients(self) -> Losses:
        if self._recorder is None:
            return super().compute_gradients()
        # all of them, as a recording has memory for all
        batches = [batch for batch, _ in super().micro_batches()]
        inputs: list[Tensor] = []
        recording = self._find_recording(batches, inputs)
        self._recording = recording
        if recording is None:
            self._shown = None
            with self._beside(inputs):
                return self._of_given(batches)
        self._replay(recording, "gradients")
        self._show_gradients(recording)
        return recording.losses

    def _show_gradients(self, recording: _Recording) -> None:
        """Let the parameters have the gradients that the recording writes."""
        hooks_act = "judgement" in recording.replays
        if self._shown is recording and not hooks_act:
            # checking one is enough; a group may have no parameters yet
            first = recording.gradients[:1]
            if all(parameter.grad is gradient for parameter, gradient in first):
                return
        for parameter, gradient in recording.gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        self._shown = recording

    def _of_given(self, batches: Sequence[Any]) -> Losses:
        self._given = batches
        try:
            return super().compute_gradients()
        finally:
            self._given = ()

    def unscale(self) -> None:
        """Of an `AMPTrainer`; a recording does it with the backward pass."""
        if self._recording is None:
            with self._beside():
                super().unscale()  # type: ignore[misc]

    def judge_and_clip(self, losses: Losses) -> dict[str, Tensor]:
        if self._recording is None:
            with self._beside():
                return super().judge_and_clip(losses)
        hooks_have_acted = "judgement" in self._recording.replays
        if hooks_have_acted:
            for parameter, gradient in self._recording.gradients:
                if parameter.grad is not gradient:
                    raise RuntimeError(
                        "a hook has exchanged a gradient in after_backward; change it in "
                        f"place, {ADVICE}"
                    )
        self._replay(self._recording, "judgement")
        return {}  # its values are among the losses'

    def update(self) -> None:
        if self._recording is not None:
            self._replay(self._recording, "update")
        elif self._recorder is None:
            super().update()
        else:
            self._fill_rates()
            with self._beside():
                self._update_on_device()
            if self._waits:
                self._refuse(self._waits[0])
            self._waits = None
        self._in_step = False

    def _beside(self, inputs: Sequence[Tensor] = ()) -> AbstractContextManager[Any]:
        if self._recorder is None:
            return nullcontext()
        contexts = ExitStack()
        contexts.enter_context(self._recorder.beside(inputs))
        if self._waits is not None:
            contexts.enter_context(self._recorder.watching(self._waits))
        return contexts

    def _replay(self, recording: _Recording, part: str) -> None:
        if part in recording.replays:
            self._fill_rates()
            recording.replays[part]()

    # ------------------------------------------------------------------ recordings

    def _find_recording(self, batches: Sequence[Any], tensors: list[Tensor]) -> _Recording | None:
        """The recording for these batches, after copying them into it; None: an ordinary step. Fills ``tensors``."""
        self._compare_constants()
        self._in_step = True
        signature = describe(batches, tensors)
        if signature in self._recordings:
            recording = self._recordings[signature]
            if recording is not None and tensors:
                torch._foreach_copy_(recording.inputs, tensors)
            return recording
        if any(tensor.device != self._device for tensor in tensors):
            signature = None  # the model may read the tensor on the host
        has_recorded_enough = len(self._recordings) == MAX_RECORDINGS
        has_seen_enough = len(self._seen) == _MAX_SIGNATURES
        if signature is None or has_recorded_enough or has_seen_enough:
            self._warn_once(
                f"{len(self._recordings)} kinds of batches are recorded, and there are more, "
                "which run as ordinary "
                "steps. Give batches of few shapes, in lists, tuples and dicts, without file "
                "names and the like"
            )
            self._seen.clear()
            return None
        num_seen = self._seen.get(signature, 0) + 1
        self._seen[signature] = num_seen
        self._newest = signature
        self._waits = [] if num_seen == WARM_UP_ITERS else None
        if num_seen <= WARM_UP_ITERS:
            return None
        del self._seen[signature]
        recording = self._record(batches, tensors)
        self._recordings[signature] = recording
        return recording

    def _refuse(self, place: str) -> None:
        """Keep such steps ordinary: a recording would fail in the middle, and CUDA would stay in capture mode."""
        self._recordings[self._newest] = None
        self._warn_once(
            f"Steps that wait for the device, as at {place}, cannot be recorded and stay "
            "ordinary steps. Neither the "
            "model nor the optimizer may read values on the host (item(), an if on a tensor, "
            "a mask); change that, "
            f"{ADVICE}"
        )

    def _warn_once(self, message: str) -> None:
        start = message[:20]  # a message may have numbers after it
        if start not in self._warned_of:
            self._warned_of.add(start)
            logger.warning("%s (iteration %d, counted from 0)", message, self.iter)

    def _record(self, batches: Sequence[Any], tensors: list[Tensor]) -> _Recording:
        """Record all parts without executing them; from now on gradients are the tensors that the recording writes."""
        recording = _Recording([tensor.clone() for tensor in tensors])
        copies: dict[int, Any] = {}
        for tensor, static in zip(tensors, recording.inputs, strict=True):
            copies[id(tensor)] = static
        batches = copy.deepcopy([*batches], copies)

        def gradients() -> None:
            losses = self._of_given(batches).detach()
            self._unscale_of_amp()
            values = {name: value.clone() for name, value in losses.items()}
            recording.losses = _RecordedLosses(values, losses.trained, total=losses.total.clone())

        def judgement() -> None:
            extra = super(GraphTrainer, self).judge_and_clip(recording.losses)
            recording.losses.pack(extra)

        stages: list[dict[str, Callable[[], None]]] = [{"gradients": gradients}]
        if self.acts_after_backward():
            stages.append({})
        stages[-1] |= {"judgement": judgement, "update": self._update_on_device}
        for stage in stages:
            first_part = next(iter(stage))
            recording.replays[first_part] = self._record_stage([*stage.values()])
        parameters = parameters_of(self.optimizer, self.model)
        with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        without = [parameter for parameter in parameters if parameter.grad is None]
        # see _show_gradients, which looks at the first
        recording.gradients = [(each, each.grad) for each in [*with_gradient, *without]]
        text = "From iteration %d (counted from 0) on, this step is replayed: recorded in %d pieces"
        logger.info(text, self.iter, len(stages))
        return recording

    def _unscale_of_amp(self) -> None:
        """Of an `AMPTrainer`; another step has no scale."""
        parent: Any = super()
        if hasattr(parent, "unscale"):
            parent.unscale()

    def _record_stage(self, works: list[Callable[[], None]]) -> Callable[[], None]:
        assert self._recorder is not None

        def work() -> None:
            for each in works:
                each()

        buffers = dict(self.model.named_buffers())
        with EventStorage() as storage:
            try:
                replay = self._recorder.record(work)
            except RuntimeError as error:
                cause = error.__context__ or error
                raise RuntimeError(
                    f"the step of iteration {self.iter} cannot be recorded as a graph: {cause}. "
                    f"Change that in the model, {ADVICE}"
                ) from error
            put = [*storage.latest()]
        replaced = []
        for name, buffer in self.model.named_buffers():
            if buffers.get(name) is not buffer:
                replaced.append(name)
        if put or replaced:
            raise RuntimeError(
                f"the model puts the scalars {put} and replaces the buffers {replaced} in its "
                "forward pass, which a "
                "replay does not repeat; return scalars with the losses, change buffers by "
                f"copy_, {ADVICE}"
            )
        return replay

    # ------------------------------------------------------------------ values that a recording contains

    def _compare_constants(self) -> None:
        objects, values = _constants_of(self)
        changed = values != self._values
        are_the_same = all(map(is_, objects, self._objects))
        if not self._in_step and not changed and are_the_same:
            return
        if changed and (self._recordings or self._seen):
            self._warn_once(
                "A setting of the optimizer, requires_grad, the mode of a module or a hook "
                "has changed, so steps are "
                "recorded again, each time; they are ordinary until nothing has changed for "
                f"{WARM_UP_ITERS} iterations"
            )
        self.forget_recordings()

    def forget_recordings(self) -> None:
        """Drop all recordings, and note the current constants; the next step is an ordinary one."""
        self._recordings = {}
        self._seen = {}
        self._in_step = False
        self._modules = []
        for module in self.model.modules():
            if "training" in vars(module):
                self._modules.append(vars(module))
        groups = self.optimizer.param_groups
        # they read the settings of a group that a recording contains
        self._settings: list[itemgetter[Any]] = []
        for group in groups:
            self._settings.append(itemgetter(*_settings_of(group)))
        self._objects, self._values = _constants_of(self)
        self._rates = torch.zeros(len(groups), dtype=torch.float32, device=self._device)
        self._filled: list[float] = []
        states = getattr(self.optimizer, "state", {})
        for parameter, state in states.items():
            for name, value in state.items():
                # such as the count of steps, which may be on the host
                if isinstance(value, Tensor):
                    state[name] = value.to(parameter.device)

    # ------------------------------------------------------------------ the optimizer

    def _update_on_device(self) -> None:
        """The update with the learning rate as a tensor; a recording would keep numbers as constants."""
        groups = self.optimizer.param_groups
        own: list[dict[str, Any]] = []
        for group in groups:
            own.append({name: group[name] for name in ("lr", "capturable") if name in group})
        try:
            for group, rate in zip(groups, self._rates.unbind(), strict=True):
                if "capturable" in group:
                    group["capturable"] = True
                group["lr"] = rate
            super().update()
        finally:
            for group, values in zip(groups, own, strict=True):
                group.update(values)

    def _fill_rates(self) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if any(isinstance(rate, Tensor) for rate in rates):
            self._filled = []
            for rate, here in zip(rates, self._rates.unbind(), strict=True):
                if isinstance(rate, Tensor):
                    here.copy_(rate.reshape(()))
                else:
                    here.fill_(rate)
        elif rates != self._filled:
            host = torch.from_numpy(np.array(rates, np.float32))
            if not self._rates.is_cpu:
                host = host.pin_memory()
            self._rates.copy_(host, non_blocking=True)
            self._filled = rates


class GraphAMPTrainer(GraphTrainer, AMPTrainer):
    """`AMPTrainer` as a graph."""


@TRAINER_REGISTRY.register()
def graph_trainer(
    cfg: CfgNode, model: nn.Module, data_loader: Iterable[Any], optimizer: torch.optim.Optimizer
) -> SimpleTrainer:
    """The builder for SOLVER.TRAINER."""
    return make_step_trainer(cfg, model, data_loader, optimizer, GraphTrainer, GraphAMPTrainer)


class _RecordedLosses(Losses):
    """Losses whose tensors the next replay overwrites, with copies for the storage."""

    @torch.no_grad()
    def pack(self, extra: Mapping[str, Tensor]) -> None:
        """Put the values into one tensor; part of the recording."""
        scalars = {**super().scalars, **extra}
        values = []
        for value in scalars.values():
            values.append(value.to(self.total.device, torch.float64, non_blocking=True))
        self._names = [*scalars]
        self._packed = torch.stack(values)

    @property
    def scalars(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._packed.clone().unbind(), strict=True))

    def read(self) -> dict[str, float]:
        return dict(zip(self._names, self._packed.tolist(), strict=True))


def _settings_of(group: Mapping[str, Any]) -> list[str]:
    """The names of the settings of a parameter group that a recording contains as constants."""
    names = []
    for name, value in group.items():
        # a replay reads tensors anew, and the rate is filled in before it
        is_constant = not isinstance(value, Tensor) and name not in ("params", "lr")
        if is_constant and not name.startswith("initial_"):
            names.append(name)
    return names


def _constants_of(trainer: GraphTrainer) -> tuple[list[object], list[object]]:
    """(objects that must stay the same, values that must stay equal)."""
    state = getattr(trainer.optimizer, "state", None)  # replaced when a state is loaded
    groups = trainer.optimizer.param_groups
    parameters = parameters_of(trainer.optimizer, trainer.model)
    # in each step, so by functions of C
    values = [
        trainer.acts_after_backward(),
        *map(_REQUIRES_GRAD, parameters),
        *map(Tensor.data_ptr, parameters),
        *map(_TRAINING, trainer._modules),
        *map(itemgetter.__call__, trainer._settings, groups),
    ]
    return [trainer.model, trainer.optimizer, state, trainer.clip_gradients], values
