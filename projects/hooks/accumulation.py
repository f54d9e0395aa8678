"""A number of micro-batches that changes during a run."""

from collections.abc import Sequence

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase, Priority
from trainkit.utils.periods import check_period


@HOOK_REGISTRY.register()
class AccumulationSchedule(HookBase):
    """From each iteration of ``factors`` on, draw so many times the trainer's first number of micro-batches.

    In a config: ``{NAME: AccumulationSchedule, FACTORS: [[1000, 4], [5000, 16]]}``. Epochs are those of the first
    number, so give lengths in iterations.
    """

    priority = Priority.HIGHEST
    config_keys = (("factors", "SOLVER.ACCUMULATION_FACTORS"),)

    def __init__(self, factors: Sequence[Sequence[int]]) -> None:
        self._factors = [(check_period("iteration", at), check_period("factor", to, minimum=1)) for at, to in factors]
        if self._factors != sorted(dict(self._factors).items()):
            raise ValueError(f"the iterations of factors must grow, got {factors!r}")
        self._first = 0

    def before_train(self) -> None:
        self._first = self._first or self.trainer.accumulation_steps

    def before_step(self) -> None:
        factor = next((factor for at, factor in reversed(self._factors) if at <= self.trainer.iter), 1)
        self.trainer.accumulation_steps = self._first * factor
