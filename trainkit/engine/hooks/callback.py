"""Functions as a hook."""

from collections.abc import Callable

from trainkit.engine.hook_base import HOOK_POINTS, HookBase

Callback = Callable[..., None]


class CallbackHook(HookBase):
    """Call functions at hook points: ``CallbackHook(after_step=lambda trainer: ...)``.

    Each function gets the trainer, then the arguments of the point.
    """

    def __init__(
        self,
        *,
        before_train: Callback | None = None,
        after_train: Callback | None = None,
        before_step: Callback | None = None,
        after_step: Callback | None = None,
        **others: Callback | None,
    ) -> None:
        usual = {"before_train": before_train, "after_train": after_train}
        usual |= {"before_step": before_step, "after_step": after_step}
        for point, callback in (usual | others).items():
            if point not in HOOK_POINTS:
                raise TypeError(f"there is no hook point {point!r}; there are {', '.join(HOOK_POINTS)}")
            if callback is None:
                continue
            if not callable(callback):
                raise TypeError(f"{point} must be a function of the trainer, got {callback!r}")
            # set on the object, not in the class: a point without a function must cost nothing
            setattr(self, point, lambda *args, callback=callback: callback(self.trainer, *args))
