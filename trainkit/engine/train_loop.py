"""The loop and its hooks. It knows nothing of models, data or optimizers."""

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from trainkit.config import ConfigError
from trainkit.engine.hook_base import EPOCH_POINTS, HookBase, Priority
from trainkit.engine.hook_list import Anchor, HookList
from trainkit.engine.periods import check_period, is_due
from trainkit.evaluation.observer import InferenceObserver, Phase
from trainkit.utils import comm
from trainkit.utils.events import EventStorage

__all__ = ["HookBase", "Priority", "TrainerBase", "check_period", "is_due"]

logger = logging.getLogger(__name__)

Status: TypeAlias = Literal["not started", "running", "finished", "stopped", "failed"]


class TrainerBase(InferenceObserver):
    """The loop: ``run_step()`` once per iteration, with hooks around it. A subclass defines ``run_step``.

    Attributes:
        iter: the current iteration, counted from 0. During ``after_step`` the one just done; after a run that
            finished, ``max_iter``.
        start_iter: the iteration with which ``train()`` began.
        max_iter: the iteration with which it ends, not included.
        storage: the `EventStorage` that is open during ``train()``.
        status: "not started", "running", "finished", "stopped" (by ``request_stop``) or "failed".
    """

    def __init__(self) -> None:
        self._hook_list = HookList()
        self._stop: tuple[str, bool] | None = None
        self._last_done_iter = -1
        self.iter = 0
        self.start_iter = 0
        self.max_iter = 0
        self.storage: EventStorage
        self.status: Status = "not started"

    # ------------------------------------------------------------------ the loop

    def train(self, start_iter: int, max_iter: int) -> None:
        """Run the iterations ``start_iter`` (included) to ``max_iter`` (excluded); can be called again.

        Raises:
            ValueError: ``start_iter`` is negative or larger than ``max_iter``.
        """
        if not 0 <= start_iter <= max_iter:
            raise ValueError(f"need 0 <= start_iter <= max_iter, got start_iter={start_iter} and max_iter={max_iter}")
        logger.info(
            "Training from iteration %d to %d; hooks in order:\n%s", start_iter, max_iter, self.describe_hooks()
        )
        self.iter, self.start_iter, self.max_iter = start_iter, start_iter, max_iter
        self._last_done_iter = start_iter - 1
        self._hook_list.update()  # the list may have been rearranged by hand
        self._compare_hooks()
        per_epoch = self._checked_epoch_length()
        self.status, self._stop = "running", None

        with EventStorage(start_iter) as self.storage:
            try:
                self.before_train()
                while self.iter < self.max_iter and self._stop is None:
                    self.storage.iter = self.iter  # what a hook or a model puts belongs to this iteration
                    self.storage.raise_error()  # what a worker has found wrong in earlier ones
                    if per_epoch and self.iter % per_epoch == 0:
                        self.before_epoch()
                    self.before_step()
                    self.run_step()
                    self._last_done_iter = self.iter
                    self.after_step()
                    if per_epoch and (self.iter + 1) % per_epoch == 0:
                        self.after_epoch()
                    self.iter += 1
                self.storage.flush()  # what a worker found wrong still counts
                self._end()
            except BaseException as error:
                self.status = "failed"
                self._log_failure(error)
                raise
            finally:
                self.after_train()

    def run_step(self) -> None:
        """One iteration: one update of whatever is trained."""
        raise NotImplementedError(f"{type(self).__name__} must define run_step()")

    def request_stop(self, reason: str, *, finished: bool = False) -> None:
        """End the run after this iteration, as "stopped", or as "finished" if it has reached what it was for.

        Every rank must call it in the same iteration.
        """
        if self._stop is None:
            self._stop = (reason, finished)

    def _compare_hooks(self) -> None:
        """A hook that only some ranks have waits for the others for ever if it takes part in an exchange."""
        by_rank = comm.all_gather(self.describe_hooks())
        for rank, hooks in enumerate(by_rank):
            if hooks != by_rank[0]:
                logger.warning(
                    "Rank %d has other hooks than rank 0; register them on all ranks:\n%s\n%s", rank, hooks, by_rank[0]
                )

    def _end(self) -> None:
        self.status = "finished"
        if self._stop is not None:
            reason, finished = self._stop
            logger.info("Stopped after %d of %d iterations: %s", self.iter, self.max_iter, reason)
            if finished:
                self.max_iter = self.iter
            elif self.iter < self.max_iter:
                self.status = "stopped"

    def _log_failure(self, error: BaseException) -> None:
        traced = isinstance(error, Exception) and not isinstance(error, ConfigError)  # not Ctrl-C either
        logger.error("Training failed in iteration %d: %s: %s", self.iter, type(error).__name__, error, exc_info=traced)
        try:
            self.storage.flush()
        except Exception as later:
            if later is not error:
                logger.error("Storing or writing metrics failed as well: %s: %s", type(later).__name__, later)

    # ------------------------------------------------------------------ hook points

    def before_train(self) -> None:
        for hook in self._hook_list.at("before_train"):
            hook.before_train()

    def before_epoch(self) -> None:
        for hook in self._hook_list.at("before_epoch"):
            hook.before_epoch()

    def before_step(self) -> None:
        for hook in self._hook_list.at("before_step"):
            hook.before_step()

    def after_backward(self) -> None:
        """``run_step`` must call it between the gradients and the update."""
        for hook in self._hook_list.at("after_backward"):
            hook.after_backward()

    def after_step(self) -> None:
        for hook in self._hook_list.at("after_step"):
            hook.after_step()

    def after_epoch(self) -> None:
        for hook in self._hook_list.at("after_epoch"):
            hook.after_epoch()

    def after_train(self) -> None:
        """Every hook gets its ``after_train``, whatever happened; the first failure here is raised at the end."""
        self.storage.iter = self.iter
        first_error: BaseException | None = None
        calls = [(type(hook).__name__, hook.after_train) for hook in self._hook_list.at("after_train")]
        for name, call in [*calls, ("Storing or writing metrics", self.storage.flush)]:
            try:
                call()
            except BaseException as error:
                traced = isinstance(error, Exception)  # not Ctrl-C
                logger.error("%s failed in after_train: %s: %s", name, type(error).__name__, error, exc_info=traced)
                if self.status != "failed":  # a failure before this one is the one to raise
                    self.status, first_error = "failed", error
        if first_error is not None:
            raise first_error

    def before_eval(self, phase: Phase, name: str) -> None:
        """This and the next three: called by ``inference_on_dataset`` under `observe_inference`."""
        for hook in self._hook_list.at("before_eval"):
            hook.before_eval(phase, name)

    def before_eval_step(self, phase: Phase, index: int, inputs: Any) -> None:
        for hook in self._hook_list.at("before_eval_step"):
            hook.before_eval_step(phase, index, inputs)

    def after_eval_step(self, phase: Phase, index: int, inputs: Any, outputs: Any) -> None:
        for hook in self._hook_list.at("after_eval_step"):
            hook.after_eval_step(phase, index, inputs, outputs)

    def after_eval(self, phase: Phase, name: str, results: Mapping[str, Any]) -> None:
        for hook in self._hook_list.at("after_eval"):
            hook.after_eval(phase, name, results)

    def before_save(self, state: dict[str, Any]) -> None:
        """This and the next: called by the `Checkpointer` that saves this trainer."""
        for hook in self._hook_list.at("before_save"):
            hook.before_save(state)

    def after_load(self, state: dict[str, Any]) -> None:
        for hook in self._hook_list.at("after_load"):
            hook.after_load(state)

    # ------------------------------------------------------------------ epochs

    @property
    def iters_per_epoch(self) -> int:
        """Iterations per pass over the training data; a subclass that knows its data overrides this.

        Raises:
            ValueError: there are no epochs.
        """
        raise ValueError(f"{type(self).__name__} does not define iters_per_epoch, so it has no epochs; use iterations")

    @property
    def has_epochs(self) -> bool:
        try:
            return self.iters_per_epoch > 0
        except ValueError:
            return False

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self.iter // self.iters_per_epoch

    def _checked_epoch_length(self) -> int:
        """``iters_per_epoch``, or 0 if there are no epochs and no hook asks for them."""
        if self.has_epochs:
            return self.iters_per_epoch
        if asking := [type(hook).__name__ for point in EPOCH_POINTS for hook in self._hook_list.at(point)]:
            raise ConfigError(
                f"{', '.join(dict.fromkeys(asking))}: there is something to do at epochs, but the training data has no "
                "length, so there are none; use a period in iterations"
            )
        return 0

    # ------------------------------------------------------------------ hooks and state

    def register_hooks(
        self,
        hooks: Iterable[HookBase | None],
        *,
        priority: int | str | None = None,
        before: Anchor | None = None,
        after: Anchor | None = None,
    ) -> None:
        """Add hooks behind those of the same or a lower ``priority`` number; None entries are left out.

        Args:
            priority: 0 (first) to 100 (last), or a name of `Priority`; default is each hook's own.
            before, after: a registered hook, its class, or the name of its class: the new ones go next to it.

        Raises:
            TypeError: an entry is no `HookBase` object.
            ValueError: a hook is already registered; the priority is out of range; priority and an anchor, or two
                anchors, are given; the anchor is absent or stands for several hooks.
        """
        for hook in self._hook_list.add(hooks, priority, before, after):
            hook.trainer = weakref.proxy(self)
        self._hook_list.hand_out_states()

    def describe_hooks(self) -> str:
        """Who runs at which hook point, in which order: one line per point."""
        self._hook_list.update()
        return self._hook_list.describe()

    @property
    def _hooks(self) -> list[HookBase]:
        """The list itself, which many people who come from detectron2 rearrange by hand."""
        return self._hook_list.hooks

    @_hooks.setter
    def _hooks(self, hooks: list[HookBase]) -> None:
        self._hook_list.hooks = hooks
        self._hook_list.update()

    def state_dict(self) -> dict[str, Any]:
        """``iteration`` (the last one done) and the state of every hook that has one, under a unique name each."""
        return {"iteration": self._last_done_iter, "hooks": self._hook_list.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the iteration and give each registered hook its state; the rest waits for hooks that come later."""
        self.iter = self._last_done_iter = state_dict["iteration"]
        self._hook_list.load_state_dict(state_dict.get("hooks", {}))

    def warn_unclaimed_states(self) -> None:
        """Name the saved states whose hooks are not registered: what they remembered is lost."""
        unclaimed = self._hook_list.unclaimed()
        if unclaimed:
            logger.warning("The checkpoint has states of hooks that are not registered: %s", unclaimed)
