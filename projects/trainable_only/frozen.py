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
        self._weights = weights
        self._model = model
        self._digests: dict[str, str] = {}
        if model is not None:
            self.before_train()

    @classmethod
    def config_arguments(cls, trainer: Any) -> dict[str, Any]:
        return {"weights": trainer.cfg.MODEL.WEIGHTS}

    def before_train(self) -> None:
        if self._digests:
            return
        for name, parameter in self._parameters().items():
            if not parameter.requires_grad:
                self._digests[name] = _digest(parameter)

    def before_save(self, state: dict[str, Any]) -> None:
        own = self._parameters()
        for name in [*self._digests]:
            if own[name].requires_grad:
                del self._digests[name]
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
        differing = []
        model = {**state["model"]}
        for name in missing:
            if name in own and _digest(own[name]) == self._digests[name]:
                model[name] = own[name].detach()
            else:
                differing.append(name)
        if differing:
            raise CheckpointError(
                f"{len(differing)} frozen parameters, such as {differing[0]!r}, differ; set "
                "MODEL.WEIGHTS, or WEIGHTS of FrozenWeights in HOOKS, to the file that has them"
            )
        state["model"] = model

    def _parameters(self) -> dict[str, nn.Parameter]:
        model = unwrap_model(self._model or self.trainer.model)
        return dict(model.named_parameters())


def _digest(parameter: nn.Parameter) -> str:
    return digest_of(parameter)[-1].hex()
