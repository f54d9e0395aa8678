"""A warning about parameters that get a gradient, but that no optimizer has."""

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from trainkit.utils.device import all_parameters, unwrap_model

logger = logging.getLogger(__name__)


class UntrainedParameters:
    """Warns once about each parameter of a model that gets a gradient, and that no optimizer has.

    A parameter that is frozen when the optimizer is built is usually in no optimizer. If a hook
    unfreezes it later, it gets gradients, but nothing trains it. Each parameter in no optimizer
    gets a function that autograd calls with its first gradient, so a step costs nothing.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._owners: list[Any] = []
        self._handles: dict[Tensor, Any] = {}  # of the parameters that are watched
        self._named: set[Tensor] = set()  # the parameters of earlier warnings

    def watch(self, model: nn.Module, owners: Iterable[Any]) -> None:
        """Watch the parameters that no optimizer has now; this can be called again.

        Args:
            owners: optimizers are found among their attributes, and in lists and dicts that are
                attributes.
        """
        self._model = unwrap_model(model)
        self._owners = [self._model, *owners]
        trained = self._trained()
        warn = weakref.WeakMethod(self._warn)
        for param in all_parameters(self._model):
            if param in trained or param in self._handles or param in self._named:
                continue
            if _can_have_gradient(param):
                self._handles[param] = _call_after_each_gradient(param, warn)

    def _warn(self, param: Tensor) -> None:
        """Name all parameters like this one, unless an optimizer has got it meanwhile."""
        trained = self._trained()
        assert self._model is not None
        self._stop_watching(param)
        if param in trained:
            return
        names: list[str] = []
        for name, other in self._model.named_parameters():
            is_alike = other in self._handles and other.requires_grad and other not in trained
            if is_alike:
                self._stop_watching(other)
            if is_alike or other is param:
                names.append(name)
                self._named.add(other)
        shown = names[:5]
        if len(names) > 5:
            shown.append("...")
        logger.warning(
            "%d parameters have gradients, but are in no optimizer, so they are not trained: %s. "
            "Give them to the optimizer when it is built, and freeze them after that, for example "
            "by the hook Freeze; or add them by optimizer.add_param_group(); or freeze them by "
            "requires_grad_(False)",
            len(names),
            ", ".join(shown),
        )

    def _stop_watching(self, param: Tensor) -> None:
        self._handles.pop(param).remove()

    def _trained(self) -> set[Tensor]:
        """The parameters of all optimizers that are found."""
        found: set[Tensor] = set()
        for owner in self._owners:
            for group in _param_groups_in(owner):
                found.update(group["params"])
        return found


def _param_groups_in(owner: Any) -> Iterator[dict[str, Any]]:
    """The groups of the optimizers among the attributes of ``owner``."""
    for value in list(vars(owner).values()):
        if isinstance(value, Mapping):
            candidates = list(value.values())
        elif isinstance(value, list | tuple | set):
            candidates = list(value)
        else:
            candidates = [value]
        for candidate in candidates:
            groups = getattr(candidate, "param_groups", None)
            if isinstance(groups, list):
                yield from groups


def _can_have_gradient(param: Tensor) -> bool:
    is_continuous = param.is_floating_point() or param.is_complex()
    return is_continuous and not param.is_inference()


def _call_after_each_gradient(param: Tensor, call: weakref.WeakMethod[Any]) -> Any:
    """Call ``call`` with the parameter after each gradient of it.

    Returns:
        The handle that ends this.
    """

    def notify(param: Tensor) -> None:
        function = call()
        if function is not None:
            function(param)

    # torch registers only on parameters that are not frozen; the function stays when they are
    # frozen again
    is_trainable = param.requires_grad
    param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(notify)
    param.requires_grad_(is_trainable)
    return handle
