"""A moving average of the weights."""

import copy
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from torch import nn
from trainkit.projects.hooks.averaging import EVALUATED, TRAINED, AveragingKind, ModelAverage, averaging_rule

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils.device import unwrap_model
from trainkit.utils.periods import check_period

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class EMAHook(HookBase):
    """Average the weights over the iterations, and evaluate the average.

    A checkpoint holds the weights and the average; a best one has as ``model`` those that were scored. Every rank
    averages its own model: parameters are equal on all ranks, buffers may differ. In an evaluation the model itself
    holds the average, and saving is refused. Of several hooks, the first that is not raw is evaluated.

    Args:
        decay: weight of the old average in an update, default 0.999; ``1 - momentum`` in OpenMMLab. See
            `averaging_rule`, also for ``kind``, ``gamma`` and ``interval``.
        begin: the average starts with the weights after this many iterations (at least 1). Before that it equals the
            model.
        buffers: "copy" copies the model's buffers, "average" averages the floating-point ones.
        evaluate: which weights are evaluated: "ema" (the average), "raw" (the model's), or "both"; then the results of
            the model's weights are under "raw".
    """

    priority = 44  # after the update, before anything that evaluates or saves

    def __init__(
        self,
        decay: float | None = None,
        kind: AveragingKind = "exponential",
        *,
        gamma: float | None = None,
        interval: int = 1,
        begin: int = 0,
        buffers: Literal["copy", "average"] = "copy",
        evaluate: Literal["ema", "raw", "both"] = "ema",
    ) -> None:
        if buffers not in ("copy", "average") or evaluate not in ("ema", "raw", "both"):
            accepted = 'buffers must be "copy" or "average", and evaluate "ema", "raw" or "both"'
            raise ValueError(f"{accepted}; got {buffers!r} and {evaluate!r}")
        self._rule, self._begin = averaging_rule(kind, decay, gamma, interval), check_period("begin", begin)
        self._average_buffers, self.evaluate = buffers == "average", evaluate
        if evaluate == "raw":  # then this hook offers no other model
            self.evaluated_models = super().evaluated_models  # type: ignore[method-assign, assignment]
        self._was_evaluated = False  # whether an evaluation has used the average
        self._average: ModelAverage | None = None
        self._waiting_state: dict[str, Any] = {}

    def before_train(self) -> None:
        """Raises ConfigError if ``begin`` is after the end of the run."""
        cfg = getattr(self.trainer, "cfg", None)  # max_iter of this train() may be only a part of the run
        end = max(self.trainer.max_iter, cfg.SOLVER.MAX_ITER if cfg is not None else 0)
        if self._begin > end:
            raise ConfigError(f"begin of EMAHook is {self._begin}, but the run has only {end} iterations")
        done = self.trainer.start_iter
        state = {} if done == 0 else self.state_dict()
        if not state and done >= max(self._begin, 1):
            logger.warning("EMAHook has no average of the first %d iterations; it starts with the model", done)
        self._make_average(self.trainer.model, state)

    def after_step(self) -> None:
        assert self._average is not None
        if self.trainer.iter + 1 < self._begin:
            self._average.restart()
        else:
            self._average.update()

    def copy_buffers(self) -> None:
        """Copy the model's buffers again, unless they are averaged: later hooks may have changed them."""
        if self._average is not None:
            self._average.copy()

    def evaluated_models(self, model: nn.Module) -> dict[str, AbstractContextManager[nn.Module]]:
        """The average, and for "both" the model with the prefix "raw"; without an average only ``model``."""
        if self._waiting_state:  # without training, the average comes from the loaded checkpoint
            self._make_average(model, self._waiting_state)
        if self._average is None:
            logger.warning("EMAHook has no averaged weights, so those of the model are evaluated")
            return {"": nullcontext(model)}
        self.copy_buffers()
        self._was_evaluated = True
        logger.info("Evaluating the averaged weights")
        return {"": self._average.held(), **({"raw": nullcontext(model)} if self.evaluate == "both" else {})}

    def before_save(self, state: dict[str, Any]) -> None:
        """Make the average the ``model`` of a best checkpoint that it was chosen for."""
        if self._average is not None and self._average.is_held:
            raise RuntimeError("a model cannot be saved in the evaluation of its average; save in after_step")
        if "best_of" not in state or not self._was_evaluated:
            return
        is_raw = self.evaluate == "both" and state["best_of"].startswith("raw/")
        state[EVALUATED] = "model" if is_raw else "ema"
        if not is_raw:
            trained, average = state["model"], self.state_dict()["model"]
            state[TRAINED], state["model"] = trained, copy.copy(trained)  # copy keeps _metadata
            state["model"].update((name, average[name]) for name in trained if name in average)

    def _make_average(self, model: nn.Module, state: dict[str, Any]) -> None:
        average = ModelAverage(unwrap_model(model), self._rule, average_buffers=self._average_buffers)
        if state:
            average.load_state_dict(state["model"])
            average.steps = state["steps"]
        self._average, self._waiting_state = average, {}

    def state_dict(self) -> dict[str, Any]:
        """``model`` (the state of the average), ``steps`` and ``was_evaluated``; empty before the first run."""
        if self._waiting_state or self._average is None:
            return self._waiting_state
        self.copy_buffers()
        counts = {"steps": self._average.steps, "was_evaluated": self._was_evaluated}
        return {"model": self._average.state_dict(), **counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._was_evaluated = state_dict.get("was_evaluated", False)
        self._waiting_state = dict(state_dict)
