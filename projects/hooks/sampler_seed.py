"""What depends on the epoch: the order of the data, and periods."""

from fractions import Fraction
from math import floor
from typing import Any

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils.periods import exact, is_last, is_nth, periods_done


def is_due_epoch(trainer: Any, period: int, *, offset: int = 0, or_last: bool = False) -> bool:
    """Whether an action with this period in epochs is due; call it at the end of an epoch."""
    last = max(trainer.epoch + 1, periods_done(trainer.iter + 1, trainer.iters_per_epoch))
    ends = any(is_nth(epoch, period, offset) for epoch in range(trainer.epoch + 1, last + 1))
    return ends or (or_last and is_last(trainer))


@HOOK_REGISTRY.register()
class SamplerSeed(HookBase):
    """Tell the epoch to a sampler whose order depends on it, such as ``torch.utils.data.DistributedSampler``.

    ``set_epoch(epoch)`` of the loader, its dataset, sampler and batch sampler is called if it exists: before each
    epoch, before a run that starts inside one, and when a new pass over the data starts between micro-batches.
    """

    priority = 43

    @classmethod
    def is_needed(cls, trainer: Any) -> bool:
        # a feed with a schedule has no epochs, and then the hook is an error
        return bool(_listeners(trainer.data_loader) and (trainer.has_epochs or trainer.feed.schedule))

    def before_train(self) -> None:
        self.before_epoch()
        if hasattr(self.trainer, "feed"):
            self.trainer.feed.before_pass = self._begin_pass

    def before_epoch(self) -> None:
        # not trainer.epoch, which is rounded: the pass that a resumed run continues may end inside this iteration
        self._tell(self.trainer.iter // exact(self.trainer.iters_per_epoch))

    def _begin_pass(self, drawn: int) -> None:
        share = Fraction(drawn, self.trainer.accumulation_steps)
        passes = (self.trainer.iter + share) / exact(self.trainer.iters_per_epoch)
        self._tell(floor(passes + Fraction(1, 2)))  # round(1.5) == round(2.5) would repeat an order

    def _tell(self, epoch: int) -> None:
        for listener in _listeners(self.trainer.data_loader):
            listener.set_epoch(epoch)


def _listeners(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, *(getattr(loader, name, None) for name in ("dataset", "sampler"))]
    parts += [batch_sampler, getattr(batch_sampler, "sampler", None)]
    return list({id(part): part for part in parts if hasattr(part, "set_epoch")}.values())
