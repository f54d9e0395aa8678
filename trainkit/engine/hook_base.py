"""What a hook is: its points, its place, its state."""

from enum import IntEnum
from typing import Any


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


HOOK_POINTS = ("before_train", "before_step", "after_backward", "after_step", "after_train")


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
    ``before_step`` should cost next to nothing, since the time of a step begins behind it. A hook deletes nothing
    in ``after_train``, so that the same trainer can ``train()`` again.
    """

    trainer: Any = None  # a weakref.proxy of the TrainerBase; Any, since a hook may know the subclass it is for
    priority: int | str = Priority.NORMAL

    def before_train(self) -> None:
        """Before the first iteration."""

    def before_step(self) -> None:
        """Before each iteration."""

    def after_backward(self) -> None:
        """When all gradients of an iteration are there, unscaled and not yet clipped."""

    def after_step(self) -> None:
        """After each iteration; ``trainer.iter`` is the one just done."""

    def after_train(self) -> None:
        """After the last iteration or a failure; ``trainer.status`` says which. On "failed" wait for no other rank."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this hook: tensors and plain Python values only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave; a hook with state overrides both.

        Raises:
            NotImplementedError: there is a state, and the hook does not say how to load it.
        """
        if state_dict:
            raise NotImplementedError(
                f"{type(self).__name__} saves a state ({', '.join(state_dict)}) but has no load_state_dict; define both"
            )
