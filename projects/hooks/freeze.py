"""Parameters that are not trained for a while."""

import fnmatch

from torch.nn import Parameter

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils.device import unwrap_model
from trainkit.utils.periods import check_period


@HOOK_REGISTRY.register()
class Freeze(HookBase):
    """Do not train the parameters with certain names in iterations ``begin <= iter < end``; None: until the end.

    A frozen parameter gets no gradient, so weight decay and momentum do not change it either. The statistics of batch
    norm layers still change. In a model inside DistributedDataParallel or ``fully_shard`` the gradients are computed
    and then removed, which saves no time. ``names`` are patterns such as ``backbone.*``, or one; each must fit a
    trainable parameter.
    """

    def __init__(self, names: str | list[str], begin: int = 0, end: int | None = None) -> None:
        self._names = [names] if isinstance(names, str) else list(names)
        self._begin = check_period("begin", begin)
        self._end = end if end is None else check_period("end", end, minimum=begin + 1)
        self._targets: list[Parameter] = []

    def before_train(self) -> None:
        model = unwrap_model(self.trainer.model)
        trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
        if wrong := [pattern for pattern in self._names if not fnmatch.filter(trainable, pattern)]:
            raise ConfigError(f"names of Freeze has {wrong}; trainable are: {', '.join(trainable)}")
        self._targets = [trainable[name] for pattern in self._names for name in fnmatch.filter(trainable, pattern)]
        # these wrappers decide in their constructors which parameters get gradients
        self._removes_gradients = model is not self.trainer.model or hasattr(model, "set_requires_gradient_sync")

    def _is_active(self) -> bool:
        return self._begin <= self.trainer.iter and (self._end is None or self.trainer.iter < self._end)

    def before_step(self) -> None:
        if not self._removes_gradients and self.trainer.iter in (self.trainer.start_iter, self._begin, self._end):
            self._train_targets(not self._is_active())

    def after_backward(self) -> None:
        if self._removes_gradients and self._is_active():
            for param in self._targets:
                param.grad = None

    def after_train(self) -> None:
        self._train_targets(True)

    def _train_targets(self, trains: bool) -> None:
        for param in self._targets:
            param.requires_grad_(trains)
            if not trains:
                param.grad = None
