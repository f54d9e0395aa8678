"""Leave frozen parameters out of checkpoints."""

import copy
from typing import Any

from torch import nn

from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.ranks import digest_of
from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT, HookBase
from trainkit.utils.device import unwrap_model


@HOOK_REGISTRY.register()
class FrozenWeights(HookBase):
    """Checkpoints hold digests of the parameters that are frozen from the start on, in place of the parameters.

    When such a checkpoint is loaded, they come from ``weights``, and their digests are compared. Without a trainer:
    ``Checkpointer(model, folder, frozen=FrozenWeights(weights, model))``.

    Args:
        weights: the file with the frozen parameters; "": the model has them when it is built.
        model: None: that of the trainer.
    """

    priority = SAVE_POINT + 4  # after the hooks that change the weights in a checkpoint

    def __init__(self, weights: str = "", model: nn.Module | None = None) -> None:
        self._weights, self._model, self._digests = weights, model, dict[str, str]()
        if model is not None:
            self.before_train()

    @classmethod
    def config_arguments(cls, trainer: Any) -> dict[str, Any]:
        return {"weights": trainer.cfg.MODEL.WEIGHTS}

    def before_train(self) -> None:
        own = self._parameters()
        self._digests = self._digests or {
            name: _digest(own[name]) for name in own if not own[name].requires_grad
        }

    def before_save(self, state: dict[str, Any]) -> None:
        own = self._parameters()
        self._digests = {
            name: digest for name, digest in self._digests.items() if not own[name].requires_grad
        }
        for key in {"model", "trained_model"} & state.keys():
            state[key] = copy.copy(state[key])  # keeps _metadata
            for name in self._digests:
                state[key].pop(name, None)
        state["frozen_digests"] = self._digests

    def after_load(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError if the frozen parameters are not those of the run."""
        self._digests = state.pop("frozen_digests", self._digests)
        missing = self._digests.keys() - state["model"].keys()
        if missing and self._weights:
            Checkpointer(self._model or self.trainer.model).load(self._weights)
        own = self._parameters()
        if other := [
            name for name in missing if name not in own or _digest(own[name]) != self._digests[name]
        ]:
            text = (
                "set MODEL.WEIGHTS, or WEIGHTS of FrozenWeights in HOOKS, to the file that has them"
            )
            raise CheckpointError(
                f"{len(other)} frozen parameters, such as {other[0]!r}, differ; {text}"
            )
        state["model"] = {**state["model"], **{name: own[name].detach() for name in missing}}

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(unwrap_model(self._model or self.trainer.model).named_parameters())


def _digest(parameter: nn.Parameter) -> str:
    return digest_of(parameter)[-1].hex()
