"""Find parameters that get no gradient."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils.device import unwrap_model
from trainkit.utils.periods import check_period, is_due

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class UnusedParameters(HookBase):
    """Name the trainable parameters without a gradient: unused in the forward pass, or used there but not by the loss.

    DistributedDataParallel would fail because of them in the next forward pass. The same result is logged only once.
    Each rank checks its own gradients and waits for no other.

    The hook slows down the forward pass of the iterations that it checks. The optimizer must set gradients to None, as
    it does by default. In a model sharded by ``fully_shard``, all parameters without a gradient count as unused in the
    forward pass.

    Args:
        period: check the first iteration of a run and every ``period``-th; 0: only the first.
        raise_error: raise RuntimeError before the update, instead of logging an error.
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
            self._remove_handles()  # still there if run_step calls no after_backward
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
        self._remove_handles()  # still there after a step that failed

    def _remove_handles(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Uses(TorchFunctionMode):
    """Between ``begin`` and ``end``, note each tensor from which a torch function makes another tensor.

    Forward hooks of modules would miss some uses: nn.MultiheadAttention never calls its out_proj, but uses its weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()  # ids are enough: parameters live longer than this object

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
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # to read a shape or a device is no use
            self.seen.update(id(leaf) for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor))
        return result
