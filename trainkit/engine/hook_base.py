"""The base class of hooks: points, priority, state; and the registry of hooks."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from operator import attrgetter
from typing import Any

from torch import nn

from trainkit.evaluation.observer import Phase
from trainkit.utils.registry import Registry

HOOK_REGISTRY = Registry("HOOK")
"""Hook classes that HOOKS in a config can name; their arguments are plain values, see
`ConfiguredHooks`."""


class Priority(IntEnum):
    """Names for hook priorities.

    Lower numbers run earlier; equal ones run in the order of registration.
    """

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


SAVE_POINT = 55
"""The priority of the save point, where checkpoints are written: hooks with a higher number run
below it."""

EPOCH_POINTS = ("before_epoch", "after_epoch")
# --eval-only calls them too
EVALUATION_POINTS = (
    "before_eval",
    "before_eval_step",
    "after_eval_step",
    "after_eval",
    "after_load",
)


class HookBase:
    """Code that runs at points of the loop.

    A subclass overrides the points that it needs; the others cost nothing.

    ``register_hooks`` sets ``self.trainer``, a weak reference: hook and trainer do not keep each
    other alive. The same trainer may ``train()`` again after ``after_train``. The epoch points need
    a trainer with epochs. Points of evaluation, saving and loading are called whenever the
    trainer's model is evaluated, saved or loaded, also by ``--eval-only``.
    """

    # a weakref.proxy of the trainer; Any, since a hook may need a certain subclass of TrainerBase
    trainer: Any = None
    priority: int | str = Priority.NORMAL
    # whether after_train saves or evaluates the run; such hooks come first in after_train
    ends: bool = False
    # (argument, key of the config that gives it)
    config_keys: tuple[tuple[str, str], ...] = ()
    # names of the attributes that are its state; in the file they have no "_"
    _state_names: tuple[str, ...] = ()

    def before_train(self) -> None:
        """Before the first iteration of each ``train()``; a new run if ``start_iter`` is 0."""

    def before_epoch(self) -> None:
        """Before the first iteration of an epoch; not in a run that is resumed inside it."""

    def before_step(self) -> None:
        """Before each iteration; its time counts in the time of the step."""

    def after_backward(self) -> None:
        """When all gradients of an iteration are computed, unscaled and not yet clipped."""

    def after_step(self) -> None:
        """After each iteration; ``trainer.iter`` is the iteration just done."""

    def after_epoch(self) -> None:
        """After the last iteration of an epoch; not if the run ends inside it."""

    def after_train(self) -> None:
        """After the last iteration or a failure; see ``trainer.status``.

        On "failed" do not wait for other ranks.
        """

    def before_eval(self, phase: Phase, name: str) -> None:
        """Before the model is run over the dataset ``name``.

        Also on a rank without a part of it.
        """

    def before_eval_step(self, phase: Phase, index: int, inputs: Any) -> None:
        """Before the model gets batch ``index``, counted from 0 on each rank.

        The tensors of ``inputs`` are on the device.
        """

    def after_eval_step(self, phase: Phase, index: int, inputs: Any, outputs: Any) -> None:
        """After the model has returned ``outputs`` for this batch."""

    def after_eval(self, phase: Phase, name: str, results: Mapping[str, Any]) -> None:
        """After the evaluation of a dataset; ``results`` are empty on ranks other than 0."""

    def before_save(self, state: dict[str, Any]) -> None:
        """Before a checkpoint is written, on every rank.

        Changes of the dict ``state`` go into the file. Its tensors are those of the run: replace
        them, do not change them in place.
        """

    def after_load(self, state: dict[str, Any]) -> None:
        """Before anything of a checkpoint is loaded, after its file is read.

        ``state["model"]`` holds the weights; changes of the dict ``state`` are loaded.
        """

    def after_failure(self, error: BaseException) -> None:
        """After a failure, on the rank that failed, before ``after_train``.

        Do not wait for other ranks.
        """

    def evaluated_models(self, model: nn.Module) -> Mapping[str, AbstractContextManager[nn.Module]]:
        """The models that an evaluation runs instead of ``model``, by the prefix of their results.

        "" is no prefix. Each is a context that returns the model. Every rank calls it, of the first
        hook that overrides it.
        """
        raise NotImplementedError

    @classmethod
    def config_arguments(cls, trainer: Any) -> Mapping[str, Any]:
        """Arguments of the constructor that ``trainer.cfg`` gives.

        The entry in HOOKS wins over them.
        """
        arguments = {}
        for name, key in cls.config_keys:
            value_of_key = attrgetter(key)
            arguments[name] = value_of_key(trainer.cfg)
        return arguments

    @classmethod
    def is_needed(cls, trainer: Any) -> bool:
        """Whether this `DefaultTrainer` gets a hook of the class.

        It is asked if a project names the class in RUN_HOOKS, and HOOKS does not.
        """
        return True

    def settings_of_early_end(self) -> dict[str, Any]:
        """The plain values by which this hook finishes a run before ``max_iter``.

        {}: it never does. If a run that it has finished is resumed with other values, the run goes
        on.
        """
        return {}

    def summary(self) -> str:
        """One line for the summary at the end of a run of `DefaultTrainer`, on rank 0.

        "" adds no line.
        """
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, of tensors and plain Python values.

        Every rank calls it at each save.
        """
        return {name.lstrip("_"): getattr(self, name) for name in self._state_names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave.

        A hook with state overrides both, or has ``_state_names``.
        """
        if state_dict and not self._state_names:
            raise NotImplementedError(
                f"{type(self).__name__} saves a state but has no load_state_dict; define both"
            )
        for name in self._state_names:
            setattr(self, name, state_dict[name.lstrip("_")])

    def saved_objects(self) -> Sequence[Any]:
        """Optimizers, schedules and modules whose state is part of this hook's.

        The trainer does not save them too.
        """
        return ()


HOOK_POINTS = tuple(name for name in vars(HookBase) if name.startswith(("before_", "after_")))
