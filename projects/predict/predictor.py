"""Predictions for samples outside of datasets."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate
from trainkit.projects.hooks.averaging import AVERAGED_PATH, EVALUATED, averaged_weights

from trainkit.checkpoint import Checkpointer
from trainkit.config import CfgNode, ConfigError, check_values, import_modules
from trainkit.data.build import build_transform
from trainkit.engine.hook_base import HookBase
from trainkit.modeling.build import build_model, on_device
from trainkit.utils.device import device_of, move_to_device
from trainkit.utils.plugins import load

logger = logging.getLogger(__name__)


class DefaultPredictor:
    """The model of a config, made by ``build``, with the weights MODEL.WEIGHTS, for one sample or a list of samples.

    It gives the same outputs as an evaluation. From a best checkpoint it takes the weights that were scored. From
    another file it takes the average if an `EMAHook` of the config evaluates it, else the model's own weights. If the
    file leaves out frozen weights, they come from the entry ``FrozenWeights`` in HOOKS, or from ``build``.
    """

    def __init__(self, cfg: CfgNode, build: Callable[[CfgNode], nn.Module] = build_model) -> None:
        check_values(cfg)
        import_modules(cfg.IMPORTS)
        if not cfg.MODEL.WEIGHTS:
            raise ConfigError(
                "MODEL.WEIGHTS is empty; set it to the checkpoint whose model should predict"
            )
        if build is build_model and not cfg.MODEL.NAME:
            raise ConfigError(
                "MODEL.NAME is empty; if a trainer class builds the model, write "
                "DefaultPredictor(cfg, Trainer.build_model)"
            )
        self.cfg = cfg.clone()
        self.model = on_device(self.cfg, build(self.cfg)).eval()
        checkpointer = Checkpointer(self.model)
        averaging = [
            entry
            for entry in self.cfg.HOOKS
            if entry["NAME"] == "EMAHook" and entry.get("ENABLED", True)
        ]
        if averaging and averaging[0].get("EVALUATE", "ema") != "raw":
            checkpointer.add_checkpointable("averaged", _TakeAverage())
        checkpointer.add_checkpointable("frozen", _TakeFrozen(self.cfg, self.model))
        checkpointer.load(self.cfg.MODEL.WEIGHTS, checkpointables=[])
        checkpointer.check_complete()
        self._transform = build_transform(self.cfg, is_train=False)
        self._device = device_of(self.model)

    def __call__(self, inputs: Any) -> Any:
        """The model's output for a sample, or a list of outputs for a list of samples, which is one batch.

        Samples are as in the test dataset, before its transform; parts that only losses use may be missing.
        """
        if not isinstance(inputs, list):
            return self([inputs])[0]
        samples = (
            inputs if self._transform is None else [self._transform(sample) for sample in inputs]
        )
        if not samples:
            return []
        batch = default_collate(samples) if self.cfg.DATALOADER.COLLATE == "default" else samples
        return self.predict_batch(batch, len(samples))

    @torch.no_grad()
    def predict_batch(self, batch: Any, num_samples: int) -> list[Any]:
        """The model's outputs for the samples of a batch, as a test loader gives it."""
        outputs = self.model(batch if self._device is None else move_to_device(batch, self._device))
        return [_take(outputs, i) for i in range(num_samples)]


class _TakeAverage(HookBase):
    """Gives the model the averaged weights of the loaded file."""

    # after_load reads these paths; a sharded checkpoint loads only paths that are named
    paths_read = (AVERAGED_PATH,)

    def after_load(self, state: dict[str, Any]) -> None:
        if EVALUATED in state:  # a best checkpoint: its entry "model" has the evaluated weights
            return
        if averaged := averaged_weights(state):
            state["model"] = {**state["model"], **averaged}
        else:
            logger.warning(
                "MODEL.WEIGHTS holds no averaged weights of an EMAHook; predicting with the model's"
            )


class _TakeFrozen(HookBase):
    """Completes a file of CHECKPOINT.TRAINABLE_ONLY, and raises CheckpointError if its frozen weights are not there."""

    def __init__(self, cfg: CfgNode, model: nn.Module) -> None:
        self._model = model
        self._weights = next(
            (entry.get("WEIGHTS", "") for entry in cfg.HOOKS if entry["NAME"] == "FrozenWeights"),
            "",
        )

    def after_load(self, state: dict[str, Any]) -> None:
        if "frozen_digests" in state:
            frozen_weights = load("FrozenWeights")
            frozen_weights(self._weights, self._model).after_load(state)


def _take(outputs: Any, i: int) -> Any:
    """Entry ``i`` of a batch of outputs: tensors ``[N, ...]``, also in dicts and tuples, or a list."""
    if isinstance(outputs, Mapping):
        return {name: _take(value, i) for name, value in outputs.items()}
    if isinstance(outputs, tuple):
        return tuple(_take(value, i) for value in outputs)
    return outputs[i]
