"""Another order of the data in every epoch."""

import logging
from typing import Any

from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks.registry import HOOK_REGISTRY

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class SamplerSeed(HookBase):
    """Tell the epoch to what shuffles by it, such as ``torch.utils.data.DistributedSampler``.

    ``set_epoch(epoch)`` of the loader, its dataset, sampler and batch sampler, whichever have it, is called before each
    epoch, and before a run that begins inside one. The samplers of `trainkit.data` do not need it.
    """

    def before_train(self) -> None:
        if not self._set_epoch():
            logger.warning(
                "SamplerSeed has no effect: nothing of the data loader (%s) has a set_epoch() method; leave it out",
                type(self.trainer.data_loader).__name__,
            )

    def before_epoch(self) -> None:
        self._set_epoch()

    def _set_epoch(self) -> bool:
        listeners = _find_listeners(self.trainer.data_loader)
        for listener in listeners:
            listener.set_epoch(self.trainer.epoch)
        return bool(listeners)


def _find_listeners(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = [
        loader,
        getattr(loader, "dataset", None),
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    return list({id(each): each for each in candidates if hasattr(each, "set_epoch")}.values())
