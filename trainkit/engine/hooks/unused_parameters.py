"""Which parameters get no gradient, and why."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks.registry import HOOK_REGISTRY
from trainkit.engine.periods import check_period, is_due
from trainkit.utils.model import unwrap_model

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class UnusedParameters(HookBase):
    """Name the trainable parameters without a gradient: what forward never used, and what it used and the loss did not.

    DistributedDataParallel would fail at them in the next forward pass. A finding that stays the same is logged once.
    Each rank looks at its own gradients and waits for nobody.

    It slows down the forward pass of the iterations in which it looks. The optimizer has to set gradients to None,
    as it does by default. In a model sharded by ``fully_shard``, all parameters without a gradient count as never used.

    Args:
        period: look in the first iteration of a run and in every ``period``-th; 0: only in the first.
        raise_error: end the run before the update, instead of logging an error.

    Raises:
        RuntimeError: in ``after_backward``, if ``raise_error`` and there are such parameters.
    """

    def __init__(self, period: int = 1, raise_error: bool = False) -> None:
        self._period = check_period("period", period)
        self._raise_error = raise_error
        self._uses = _Uses()
        self._handles: list[RemovableHandle] = []
        self._last_finding = ""

    def before_train(self) -> None:
        self._last_finding = ""

    def before_step(self) -> None:
        if self.trainer.iter == self.trainer.start_iter or is_due(self.trainer, self._period):
            model = unwrap_model(self.trainer.model)
            self._remove_handles()  # of a run_step that calls no after_backward
            self._uses.seen.clear()
            self._handles = [
                model.register_forward_pre_hook(lambda module, inputs: self._uses.begin()),
                model.register_forward_hook(lambda module, inputs, output: self._uses.end(), always_call=True),
            ]

    def after_backward(self) -> None:
        if not self._handles:
            return
        self._remove_handles()
        without = [
            (name, parameter)
            for name, parameter in unwrap_model(self.trainer.model).named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        used = [name for name, parameter in without if id(parameter) in self._uses.seen]
        never_used = [name for name, _ in without if name not in used]
        finding = (
            f"never used in the forward pass: {', '.join(never_used) or 'none'}; used there, but the loss does not "
            f"depend on them: {', '.join(used) or 'none'}. Remove or freeze them"
        )
        if without and self._raise_error:
            raise RuntimeError(f"parameters without a gradient in iteration {self.trainer.iter}, {finding}")
        if without and finding != self._last_finding:
            logger.error("Parameters without a gradient in iteration %d, %s", self.trainer.iter, finding)
        self._last_finding = finding

    def after_train(self) -> None:
        self._remove_handles()  # those of a step that failed

    def _remove_handles(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Uses(TorchFunctionMode):
    """Between ``begin`` and ``end``, note each tensor that a torch function makes another one of.

    Modules are not asked: some, such as out_proj in nn.MultiheadAttention, are never called, and their parameters used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()  # ids: parameters live longer than this looks

    def begin(self) -> None:
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # asking for a shape or a device uses nothing
            self.seen.update(id(leaf) for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor))
        return result
