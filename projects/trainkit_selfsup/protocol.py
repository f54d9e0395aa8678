"""What the hooks need of a model, and what hooks of clusters have in common."""

from operator import attrgetter
from typing import Any

from torch import Tensor

from trainkit.config import ConfigError
from trainkit.engine import HookBase
from trainkit.engine.hooks import check_number
from trainkit.utils.device import unwrap_model


def model_of(hook: HookBase, *needed: str) -> Any:
    """The model that ``hook`` is trained with, without wrappers; ``needed`` are paths such as "head.loss.queue".

    Raises ConfigError: the model lacks one of them.
    """
    model = unwrap_model(hook.trainer.model)
    for path in needed:
        try:
            attrgetter(path)(model)
        except AttributeError as error:
            raise ConfigError(
                f"{type(hook).__name__} needs {path} of the model, see its docstring: {error}"
            ) from error
    return model


class ClusterHook(HookBase):
    """Base class of hooks that weight the classes in a loss by the sizes of clusters, see `DeepClusterHook`."""

    def __init__(self, reweight: bool, reweight_pow: float) -> None:
        self._reweight = reweight
        self._power = check_number("reweight_pow", reweight_pow, "[0, inf)")

    def find_model(self, *needed: str) -> None:
        """Set ``_model``. Raises ConfigError: it lacks a path of ``needed``, or is sharded."""
        paths = [*needed]
        if self._reweight:
            paths.append("loss_weight")
        self._model = model_of(self, *paths)
        if hasattr(self._model, "set_requires_gradient_sync"):
            raise ConfigError(
                f'{type(self).__name__} does not work with MODEL.PARALLEL "fsdp"; make it "ddp"'
            )
        head = getattr(self._model, "head", None)
        loss: Any = getattr(head, "loss", None)
        if self._reweight and hasattr(loss, "class_weight"):
            # also in a resumed run: a checkpoint does not hold this
            loss.class_weight = self._model.loss_weight

    def weight_classes(self, sizes: Tensor) -> None:
        if self._reweight:
            self._model.loss_weight.copy_(loss_weights(sizes, self._power))

    def put_sizes(self, sizes: Tensor) -> None:
        """Store the smallest and the largest size, and the number of empty clusters."""
        scalars = {
            "clusters/smallest": int(sizes.min()),
            "clusters/largest": int(sizes.max()),
            "clusters/empty": int((sizes == 0).sum()),
        }
        self.trainer.storage.put_scalars(**scalars, smoothing_hint=False)


def loss_weights(sizes: Tensor, power: float) -> Tensor:
    """The weights of clusters with these sizes ``[K]``, see `DeepClusterHook`."""
    # by logarithms: the power of an empty cluster overflows float32 from an exponent of 4 on
    logarithms = -power * (sizes.double() + 1e-10).log()
    return logarithms.softmax(0).float()
