"""The hook of DenseCL (arXiv:2011.09157)."""

from typing import Any

from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY, check_period
from trainkit_selfsup.protocol import model_of


@HOOK_REGISTRY.register()
class DenseCLHook(HookBase):
    """Leave out the dense loss in the first iterations, because early features cannot match positions of two views.

    The model has ``loss_lambda``, a number that its loss reads in each forward pass. The hook sets it to 0 before
    iteration ``start_iters``. From this iteration on, and after the end of the run, it has the model's own value. With
    ``momentum`` the hook calls ``update_key_encoder(momentum)`` of the model after each update.
    """

    _model: Any = None

    def __init__(self, start_iters: int = 1000, momentum: float | None = None) -> None:
        if momentum is not None and not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be from 0 to 1, got {momentum}")
        self._start_iters, self._momentum = check_period("start_iters", start_iters), momentum

    def before_train(self) -> None:
        self._model = model_of(self, "loss_lambda", *["update_key_encoder"] * (self._momentum is not None))
        self._loss_lambda = self._model.loss_lambda

    def before_step(self) -> None:
        self._model.loss_lambda = self._loss_lambda if self.trainer.iter >= self._start_iters else 0.0

    def after_step(self) -> None:
        if self._momentum is not None:
            self._model.update_key_encoder(self._momentum)

    def after_train(self) -> None:
        if self._model is not None:
            self._model.loss_lambda = self._loss_lambda
