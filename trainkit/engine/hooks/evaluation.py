"""Hooks that evaluate the model and store the results."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT
from trainkit.engine.hooks.monitor import PeriodicHook
from trainkit.evaluation.observer import Phase, observe_inference
from trainkit.evaluation.testing import flatten_results_dict, result_as_float
from trainkit.utils import comm
from trainkit.utils.env import preserve_rng_state
from trainkit.utils.periods import check_period, say_done

logger = logging.getLogger(__name__)

_NUM_SHOWN = 6  # results in a line of the log


@HOOK_REGISTRY.register()
class EvalHook(PeriodicHook):
    """Call ``eval_function()`` every ``eval_period`` iterations, and store its results.

    Also after training. The function returns a nested dict of numbers, stored as ``outer/inner``,
    or None on ranks other than 0. An array or a tensor with one element is a number too. Every rank
    calls it in the same iteration.

    Args:
        eval_period: 0: only after training.
        eval_after_train: True: the last evaluation is after training, not in the last iteration.
        eval_at_start: also evaluate before iteration 0, to find a broken evaluator early.
        phase: passed to the evaluation hook points, see `HookBase.before_eval`.
        logs_last: whether the log gets a line of the results after training too. A
            `DefaultTrainer` prints them as a table.
    """

    config_keys = (*PeriodicHook.config_keys, ("eval_at_start", "TEST.EVAL_AT_START"))
    _state_names = ("evaluated_iters",)

    def __init__(
        self,
        eval_period: int,
        eval_function: Callable[[], Mapping[str, Any] | None],
        eval_after_train: bool = True,
        *,
        eval_at_start: bool = False,
        phase: Phase = "val",
        logs_last: bool = True,
    ) -> None:
        super().__init__(eval_period)
        self._func = eval_function
        self.acts_in_last = not eval_after_train
        self._at_start = eval_at_start
        self.phase = phase
        self._logs_last = logs_last
        self.evaluated_iters = -1  # number of iterations done at the last evaluation

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        done = state_dict["evaluated_iters"]
        self.evaluated_iters = check_period("evaluated_iters", done, minimum=-1)

    def before_train(self) -> None:
        # from another run
        if self.trainer.start_iter == 0 or self.evaluated_iters > self.trainer.start_iter:
            self.evaluated_iters = -1
        if self._at_start and self.trainer.start_iter == 0:
            self.act_now()

    def after_train(self) -> None:
        if not self.acts_in_last and self.trainer.status == "finished":
            self.act_now()

    def act_now(self) -> None:
        """Evaluate, if this is not done yet: a run may end where it has just evaluated."""
        done = self.trainer.done
        if self.evaluated_iters == done:
            return
        self.trainer.check_finite()
        # the random state is preserved, since a resumed run may evaluate again
        with observe_inference(self.trainer, self.phase), preserve_rng_state():
            self._do_eval()
        self.evaluated_iters = done
        # ranks need different times, which must not count for the timeout of the next collective
        comm.synchronize()

    def _do_eval(self) -> None:
        """Call the function and store its results.

        Subclasses written for detectron2 override this.
        """
        returned = self._func()
        if returned is not None and not isinstance(returned, Mapping):
            raise TypeError(
                f"the function of {type(self).__name__} returned {returned!r:.80}; return a dict "
                'of results, such as {"accuracy": 0.5}, or None'
            )
        results = flatten_results_dict(returned or {})
        for name, value in results.items():
            results[name] = result_as_float(name, value)
            self.trainer.storage.put_scalar(name, results[name], smoothing_hint=False)
        if results and (self._logs_last or self.trainer.is_training()):
            shown = list(results.items())[:_NUM_SHOWN]
            fields = [f"Evaluated {say_done(self.trainer.done, self.trainer.max_iter)}"]
            fields += [f"{name}: {value:.4g}" for name, value in shown]
            if len(results) > len(shown):
                fields.append(f"({len(results) - len(shown)} more in the files)")
            # the log breaks a long line between fields that are two spaces apart
            logger.info("%s", "  ".join(fields))


@HOOK_REGISTRY.register()
class FinalEvalHook(EvalHook):
    """Evaluate the test data once, after a run that has finished.

    These results choose no checkpoint.
    """

    priority = SAVE_POINT + 3

    def __init__(
        self, eval_function: Callable[[], Mapping[str, Any] | None], *, logs_last: bool = True
    ) -> None:
        super().__init__(0, eval_function, phase="test", logs_last=logs_last)
