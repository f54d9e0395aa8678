"""When Python looks for garbage."""

import gc

from trainkit.engine.hook_base import SAVE_POINT, HookBase
from trainkit.engine.hooks.registry import HOOK_REGISTRY
from trainkit.engine.periods import check_period, is_due


@HOOK_REGISTRY.register()
class GarbageCollection(HookBase):
    """Collect cyclic garbage every ``period`` iterations and at no other time, on all ranks in the same step.

    Otherwise each rank pauses when it likes, and all the others wait for it. Python's own collection is off during
    training.

    Args:
        generation: 0 to 2, see ``gc.collect``; 2 looks at every object and takes seconds in a large program.

    Raises:
        ValueError: ``period`` is less than 1 iteration, or there is no such generation.
    """

    priority = SAVE_POINT + 1

    def __init__(self, period: int = 1000, generation: int = 1) -> None:
        if generation not in (0, 1, 2):
            raise ValueError(f"generation must be 0, 1 or 2, got {generation!r}")
        self._period = check_period("period", period, minimum=1)
        self._generation = generation
        self._was_enabled = False

    def before_train(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()  # what building the job has left

    def after_step(self) -> None:
        if is_due(self.trainer, self._period):
            gc.collect(self._generation)

    def after_train(self) -> None:
        if self._was_enabled:
            gc.enable()
            self._was_enabled = False  # a run that fails before it starts has nothing to put back
