"""What a hook is: its points, its place, its state."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from trainkit.evaluation.observer import Phase
from trainkit.utils.stateful import refuse_state


class Priority(IntEnum):
    """Names for the places of hooks: the lower, the earlier. Equal ones run in the order of their registration."""

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
"""The priority at which checkpoints are written: hooks with a higher number run below the save point."""

HOOK_POINTS = (
    "before_train",
    "before_epoch",
    "before_step",
    "after_backward",
    "after_step",
    "after_epoch",
    "after_train",
    "before_eval",
    "before_eval_step",
    "after_eval_step",
    "after_eval",
    "before_save",
    "after_load",
)
EPOCH_POINTS = ("before_epoch", "after_epoch")
EVALUATION_POINTS = ("before_eval", "before_eval_step", "after_eval_step", "after_eval", "after_load")  # of --eval-only


class HookBase:
    """Something that happens at points of the loop; a subclass overrides the points it needs.

    ::

        hook.before_train()
        for iter in range(start_iter, max_iter):
            hook.before_step()
            trainer.run_step()        # calls hook.after_backward() between the gradients and the update
            hook.after_step()
        hook.after_train()

    ``self.trainer`` is set by ``register_hooks`` and is a weak reference: hook and trainer keep nobody else alive.
    ``before_step`` should cost next to nothing, since the time of a step starts after it. A hook deletes nothing
    in ``after_train``, so that the same trainer can ``train()`` again. A point that is not overridden costs nothing.

    The points of epochs need a trainer that has epochs. Those of evaluation, saving and loading are called whenever
    the trainer's model is evaluated, saved or loaded, by ``--eval-only`` as well.
    """

    trainer: Any = None  # a weakref.proxy of the TrainerBase; Any, since a hook may know the subclass it is for
    priority: int | str = Priority.NORMAL
    ends: bool = False  # whether its after_train saves or evaluates the run: before that of all hooks that do not

    def before_train(self) -> None:
        """Before the first iteration, also of a run that goes on: only at ``start_iter`` 0 a hook starts again."""

    def before_epoch(self) -> None:
        """Before the first iteration of an epoch. A run that is resumed inside an epoch does not start it again."""

    def before_step(self) -> None:
        """Before each iteration."""

    def after_backward(self) -> None:
        """When all gradients of an iteration are there, unscaled and not yet clipped."""

    def after_step(self) -> None:
        """After each iteration; ``trainer.iter`` is the one just done."""

    def after_epoch(self) -> None:
        """After the last iteration of an epoch; one that the end of the run cuts short has none."""

    def after_train(self) -> None:
        """After the last iteration or a failure; ``trainer.status`` says which. On "failed" wait for no other rank."""

    def before_eval(self, phase: Phase, name: str) -> None:
        """Before the model is run over the dataset ``name``; also on a rank whose part of it is empty."""

    def before_eval_step(self, phase: Phase, index: int, inputs: Any) -> None:
        """Before the model sees batch ``index``, counted from 0 on each rank; its tensors are on the device."""

    def after_eval_step(self, phase: Phase, index: int, inputs: Any, outputs: Any) -> None:
        """When the model has returned ``outputs`` for it."""

    def after_eval(self, phase: Phase, name: str, results: Mapping[str, Any]) -> None:
        """When the dataset is evaluated; ``results`` are empty on ranks other than 0."""

    def before_save(self, state: dict[str, Any]) -> None:
        """Before a checkpoint is written; what is put into or taken from ``state`` is so in the file. On every rank.

        Its tensors are those of the run: replace them, do not change them.
        """

    def after_load(self, state: dict[str, Any]) -> None:
        """When a checkpoint is read and before anybody takes his part; ``state["model"]`` are the weights."""

    def summary(self) -> str:
        """A line for what a `DefaultTrainer` says at the end of a run, on rank 0; "" for none."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this hook: tensors and plain Python values only.

        Every rank asks for it at each save, at the save point or at the end of an iteration. A hook below the save
        point must do nothing if it is called again for the iteration that it has handled last: a run that is stopped
        in an evaluation repeats what comes after the save point.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave; a hook with state overrides both.

        Raises:
            NotImplementedError: there is a state, and the hook does not say how to load it.
        """
        refuse_state(self, state_dict)
