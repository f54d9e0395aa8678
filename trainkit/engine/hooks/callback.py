"""Functions as a hook."""

from collections.abc import Callable
from typing import Any

from trainkit.engine.hook_base import HOOK_POINTS, HookBase


class CallbackHook(HookBase):
    """Call functions at hook points: ``CallbackHook(after_step=lambda trainer: ...)``.

    Each function gets the trainer, then the arguments of the point; None does nothing.
    """

    def __init__(
        self,
        *,
        before_train: Callable[..., None] | None = None,
        after_train: Callable[..., None] | None = None,
        before_step: Callable[..., None] | None = None,
        after_step: Callable[..., None] | None = None,
        **others: Callable[..., None] | None,
    ) -> None:
        callbacks = {
            "before_train": before_train,
            "after_train": after_train,
            "before_step": before_step,
            "after_step": after_step,
            **others,
        }
        for point, callback in callbacks.items():
            if point not in HOOK_POINTS:
                raise TypeError(f"got {point!r}; accepted: {', '.join(HOOK_POINTS)}")
            if callback is not None:
                # set on the object, not in the class: a point without a function must cost nothing
                setattr(self, point, self._with_trainer(callback))

    def _with_trainer(self, callback: Callable[..., None]) -> Callable[..., None]:
        """A function of the arguments of a point, which calls ``callback(trainer, ...)``."""

        def call(*args: Any) -> None:
            callback(self.trainer, *args)

        return call
