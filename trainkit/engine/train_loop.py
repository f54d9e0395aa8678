"""The loop and its hooks. It knows nothing of models, data or optimizers."""

import logging
import signal
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

from trainkit.config import ConfigError
from trainkit.engine.hook_base import EPOCH_POINTS, ITERATION_POINTS, HookBase, Priority
from trainkit.engine.hook_list import Anchor, HookList
from trainkit.engine.periods import check_period, is_due
from trainkit.engine.stopping import Stop, StopRequests
from trainkit.evaluation.observer import EvaluationAbandoned, InferenceObserver, Phase
from trainkit.utils import comm
from trainkit.utils.events import EventStorage
from trainkit.utils.rng import derive_rng_state, get_rng_state, set_rng_state

__all__ = ["HookBase", "Priority", "TrainerBase", "check_period", "is_due"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
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
        own_keys: the entries of the state that each rank has for itself.
    """

    own_keys: tuple[str, ...] = ("hooks", "storage", "rng")

    def __init__(self) -> None:
        self._hook_list = HookList()
        self._stops = StopRequests()
        self._stop: Stop | None = None
        self._finished_early = False
        self._last_done_iter = -1
        self._per_epoch = 0  # iterations; 0: there are no epochs
        # where a run stands inside an iteration: the point, and the hook there that had its turn last
        self._point = "before_train"
        self._turn: HookBase | None = None
        self._evaluating: HookBase | None = None  # the one inside whose turn data are evaluated
        # what a checkpoint, or the stop of a run, has left for the next train()
        self._cursor: dict[str, Any] | None = None
        self._waiting_rng_state: dict[str, Any] | None = None
        self._waiting_storage: dict[str, Any] | None = None
        self._asked_max_iter = 0
        self._ranks_agree = True
        self.iter = 0
        self.start_iter = 0
        self.max_iter = 0
        self.storage: EventStorage
        self.status: Status = "not started"

    # ------------------------------------------------------------------ the loop

    def train(self, start_iter: int, max_iter: int) -> None:
        """Run the iterations ``start_iter`` (included) to ``max_iter`` (excluded); can be called again.

        Behind a loaded checkpoint, or in a run that was stopped, it first does what is left of the iteration before
        ``start_iter``. SIGTERM, SIGHUP and SIGINT stop the run as ``request_stop`` does.

        Raises:
            ValueError: ``start_iter`` is negative or larger than ``max_iter``.
            SystemExit: after a run that was stopped by SIGTERM (code 143) or SIGHUP (129).
            KeyboardInterrupt: behind a run that was stopped by SIGINT.
        """
        if not 0 <= start_iter <= max_iter:
            raise ValueError(f"need 0 <= start_iter <= max_iter, got start_iter={start_iter} and max_iter={max_iter}")
        self._begin(start_iter, max_iter)
        with self._stops.listening(), self.storage:
            try:
                self.before_train()
                self._go_to_cursor()
                while self.iter < self.max_iter and not self._is_to_stop():
                    self._iterate()
                self.storage.flush()  # what a worker found wrong still counts
                self.check_finite()
                self._end()
            except EvaluationAbandoned:
                self._abandon()
            except BaseException as error:
                self.status = "failed"
                self._log_failure(error)
                raise
            finally:
                self.after_train()
        self._pass_signal_on()

    def _iterate(self) -> None:
        """One iteration, or the part of it that a checkpoint has left."""
        self.storage.begin_iter(self.iter)  # raises what a worker has found wrong in earlier ones
        if self._last_done_iter < self.iter:
            if self._per_epoch and self.iter % self._per_epoch == 0:
                self.before_epoch()
            self.before_step()
            self._point, self._turn = "run_step", None
            self.run_step()
            self._last_done_iter = self.iter
            self._point = "after_step"
        self.after_step()
        if self._per_epoch and (self.iter + 1) % self._per_epoch == 0:
            self.after_epoch()
        self.iter += 1

    def run_step(self) -> None:
        """One iteration: one update of whatever is trained."""
        raise NotImplementedError(f"{type(self).__name__} must define run_step()")

    def _is_to_stop(self) -> bool:
        if self._stop is None:
            self._stop = self._stops.agreed(self.iter - 1)
        return self._stop is not None

    def request_stop(self, reason: str, *, finished: bool = False) -> None:
        """End the run at the end of an iteration, as "stopped", or as "finished" if it has reached what it was for.

        A run is stopped by any rank, ``stop_check_period`` iterations later at most, and at once if there is only one.
        That it has finished every rank must say in the same iteration.
        """
        if not finished:
            self._stops.request(reason)
        elif self._stop is None:
            self._stop, self._finished_early = Stop(reason, None), True

    @property
    def stop_check_period(self) -> int:
        """After how many iterations at most all ranks stop when one has been asked to."""
        return self._stops.check_period

    @stop_check_period.setter
    def stop_check_period(self, period: int) -> None:
        self._stops.check_period = check_period("stop_check_period", period, minimum=1)

    def next_iter_of(self, hook: HookBase) -> int:
        """In ``before_train``: the iteration whose ``after_step`` is the next one to reach this hook.

        That is ``start_iter``, or the one before if a checkpoint lies before the hook's turn in it.
        """
        has_turn_left = self._cursor is not None and self._hook_list.has_turn_left(hook, self._cursor)
        return self.iter - has_turn_left

    def is_stopping(self) -> bool:
        """Whether this rank has been asked to stop: an evaluation under way is then abandoned."""
        return self._stops.pending

    def check_finite(self) -> None:
        """Raise on every rank if what is trained has become not finite; called before it is saved or evaluated."""

    def gather(self, value: _T) -> list[_T]:
        """The ``value`` of every rank; this one's alone where ranks have different hooks: not all may call it."""
        return comm.all_gather(value) if self._ranks_agree else [value]

    # ------------------------------------------------------------------ begin and end

    def _begin(self, start_iter: int, max_iter: int) -> None:
        going_on = start_iter == self._last_done_iter + 1
        if not going_on:  # it begins elsewhere than where a checkpoint or a stop has left the run
            self._cursor = self._waiting_rng_state = self._waiting_storage = None
        if not (going_on and self.status == "stopped" and self._waiting_storage is None):
            self.storage = EventStorage(start_iter)
        if self._waiting_storage is not None:
            self.storage.load_state_dict(self._waiting_storage)
            self._waiting_storage = None
        self.storage.iter = start_iter
        self.iter, self.start_iter, self.max_iter, self._asked_max_iter = start_iter, start_iter, max_iter, max_iter
        self._point, self._turn, self._evaluating = "before_train", None, None
        self._last_done_iter = start_iter - 1
        self._hook_list.update()  # the list may have been rearranged by hand
        self._per_epoch = self._checked_epoch_length()
        self._compare_hooks()
        self.status, self._stop, self._finished_early = "running", None, False
        self._stops.reset()
        self.begin_run()
        logger.info(
            "Training from iteration %d to %d; hooks in order:\n%s", start_iter, max_iter, self.describe_hooks()
        )
        saves = any(hasattr(hook, "checkpointer") for hook in self._hooks)
        if saves and (lost := self.describe_inexact()):
            logger.warning("A resumed run may differ from one that is never stopped: %s", "; ".join(lost))

    def begin_run(self) -> None:
        """Forget what steps of an earlier run have left; called when a run begins."""

    def describe_inexact(self) -> list[str]:
        """What a resumed run of this trainer does not get back; empty if it goes on bit for bit."""
        return []

    def _compare_hooks(self) -> None:
        """A hook that only some ranks have waits for the others for ever if it takes part in an exchange."""
        by_rank = comm.all_gather(self.describe_hooks())
        for rank, hooks in enumerate(by_rank):
            if hooks != by_rank[0]:
                logger.warning(
                    "Rank %d has other hooks than rank 0; register them on all ranks:\n%s\n%s", rank, hooks, by_rank[0]
                )
        self._ranks_agree = all(hooks == by_rank[0] for hooks in by_rank)

    def _go_to_cursor(self) -> None:
        """Stand where the checkpoint, or the run that was stopped, stood; do what was left of that iteration."""
        if self._waiting_rng_state is not None:
            self.make_iterators()
            set_rng_state(self._waiting_rng_state)  # last: everything before may have drawn from it
        cursor, self._cursor, self._waiting_rng_state = self._cursor, None, None
        if cursor is None:
            return
        point, end_has_moved = cursor["point"], self.max_iter > cursor["max_iter"]
        if point in ITERATION_POINTS:
            self._hook_list.leave_out(point, cursor["pending"])
            if point in ("after_step", "after_epoch"):
                self.iter, self._last_done_iter = self.start_iter - 1, self.start_iter - 1
            if self.iter < self.max_iter:  # the end may have been moved to here
                self._iterate()
            self._hook_list.update()
        elif point == "after_train" and not end_has_moved:
            self._hook_list.leave_out(point, cursor["pending"])
        if cursor["finished_early"] is not None and not end_has_moved:
            self.request_stop(cursor["finished_early"], finished=True)

    def make_iterators(self) -> None:
        """Begin to draw data: before the random state of a checkpoint is put back, since a loader may draw from it."""

    def _end(self) -> None:
        self.status = "finished"
        if self._stop is not None:
            logger.info("Stopped after %d of %d iterations: %s", self.iter, self.max_iter, self._stop.reason)
            if self._finished_early:
                self.max_iter = self.iter
            elif self.iter < self.max_iter:
                # all hooks have had their turn, those too that a cursor had left out of it
                self.status, self._cursor = "stopped", {**self._present_cursor(), "pending": []}

    def _abandon(self) -> None:
        """The run stops inside an evaluation, which is made again when it goes on."""
        if self._cursor is None:  # else nothing has been done since it was loaded
            self._cursor = self._present_cursor()
        self._stop, self._evaluating = self._stops.agree_now(), None
        self.status, self.iter = "stopped", self._last_done_iter + 1
        reason = "" if self._stop is None else self._stop.reason
        logger.info("Stopped in an evaluation, after %d of %d iterations: %s", self.iter, self.max_iter, reason)

    def _pass_signal_on(self) -> None:
        if self.status == "stopped" and self._stop is not None and self._stop.signum is not None:
            if self._stop.signum == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(self._stop.exit_code)

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
        self._point, self._turn = "before_train", None
        for hook in self._hook_list.at("before_train"):
            self._turn = hook
            hook.before_train()

    def before_epoch(self) -> None:
        self._point, self._turn = "before_epoch", None
        for hook in self._hook_list.at("before_epoch"):
            self._turn = hook
            hook.before_epoch()

    def before_step(self) -> None:
        self._point, self._turn = "before_step", None
        for hook in self._hook_list.at("before_step"):
            self._turn = hook
            hook.before_step()

    def after_backward(self) -> None:
        """``run_step`` must call it between the gradients and the update."""
        for hook in self._hook_list.at("after_backward"):
            hook.after_backward()

    def acts_after_backward(self) -> bool:
        """Whether anything happens there: in a hook, or in a subclass that overrides it."""
        overridden = type(self).after_backward is not TrainerBase.after_backward
        return overridden or bool(self._hook_list.at("after_backward"))

    def after_step(self) -> None:
        self._point, self._turn = "after_step", None
        for hook in self._hook_list.at("after_step"):
            self._turn = hook
            hook.after_step()

    def after_epoch(self) -> None:
        self._point, self._turn = "after_epoch", None
        for hook in self._hook_list.at("after_epoch"):
            self._turn = hook
            hook.after_epoch()

    def after_train(self) -> None:
        """Every hook gets its ``after_train``, whatever happened; the first failure here is raised at the end."""
        self.storage.iter = self.iter
        self._point, self._turn = "after_train", None
        first_error: BaseException | None = None
        for hook in self._hook_list.at("after_train"):
            self._turn = hook
            first_error = self._call_at_end(type(hook).__name__, hook.after_train) or first_error
        first_error = self._call_at_end("Storing or writing metrics", self.storage.flush) or first_error
        if first_error is not None:
            raise first_error

    def _call_at_end(self, name: str, call: Callable[[], None]) -> BaseException | None:
        """The failure to raise, if this is the first one."""
        try:
            call()
        except EvaluationAbandoned:
            self._abandon()
        except BaseException as error:
            traced = isinstance(error, Exception)  # not Ctrl-C
            logger.error("%s failed in after_train: %s: %s", name, type(error).__name__, error, exc_info=traced)
            if self.status != "failed":  # a failure before this one is the one to raise
                self.status = "failed"
                return error
        return None

    def before_eval(self, phase: Phase, name: str) -> None:
        """This and the next three: called by ``inference_on_dataset`` under `observe_inference`."""
        self._evaluating = self._turn
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
        self._evaluating = None

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
                f"{', '.join(dict.fromkeys(asking))}: there is work to do at epochs, but the training data has no "
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
            TypeError: an entry is no `HookBase` object, or a method of it does not take the arguments of its point.
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
        """Where the run stands, and what its hooks, its storage and the random number generators of this process hold.

        ``iteration`` is the last one done; hooks are under a unique name each.
        """
        return {
            "iteration": self._last_done_iter,
            "cursor": self.cursor,
            "world_size": comm.get_world_size(),
            "hooks": self._hook_list.state_dict(),
            "storage": self._storage_state(),
            "rng": self._waiting_rng_state or get_rng_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the iteration and give each registered hook its state; the rest waits for hooks that come later.

        The next ``train()`` goes on where the state was taken. Entries that are missing, as in files of detectron2,
        stay as they are.
        """
        self.iter = self._last_done_iter = state_dict["iteration"]
        self._hook_list.load_state_dict(state_dict.get("hooks", {}))
        if self.status == "running":  # a hook sets the model back, and the run goes on from where it is
            return
        self._cursor, self._waiting_storage = state_dict.get("cursor"), state_dict.get("storage") or None
        self._waiting_rng_state = rng_state = state_dict.get("rng")
        world_size = state_dict.get("world_size", 1)
        if rng_state is not None and world_size != comm.get_world_size():
            self._waiting_rng_state = derive_rng_state(rng_state, comm.get_rank(), self.iter)
            logger.warning(
                "The checkpoint was written by %d processes, now there are %d: their random state is derived anew, "
                "from the checkpoint, the rank and the iteration",
                world_size,
                comm.get_world_size(),
            )

    @property
    def rank_keys(self) -> tuple[str, ...]:
        """``own_keys``, which are gathered over the ranks; none if not all ranks save."""
        return self.own_keys if self._ranks_agree else ()

    def _storage_state(self) -> dict[str, Any]:
        if self._waiting_storage is not None:
            return self._waiting_storage
        return self.storage.state_dict() if hasattr(self, "storage") else {}

    @property
    def cursor(self) -> dict[str, Any]:
        """Where the run stands inside an iteration, as a checkpoint has it."""
        return self._cursor or self._present_cursor()

    def _present_cursor(self) -> dict[str, Any]:
        """The hook point, the names of the hooks that have yet to run there, and what ends the run behind it."""
        has_its_turn = self._turn is not None and self._turn is self._evaluating
        point, pending = self._point, self._hook_list.names_from(self._point, self._turn, including=has_its_turn)
        if point == "run_step":
            logger.warning("A checkpoint from inside an iteration cannot be resumed exactly; save in after_step")
            point, pending = "before_step", []
        return {
            "point": point,
            "pending": pending,
            "max_iter": self._asked_max_iter,
            "finished_early": self._stop.reason if self._stop is not None and self._finished_early else None,
        }

    def warn_unclaimed_states(self) -> None:
        """Name the saved states whose hooks are not registered: what they remembered is lost."""
        unclaimed = self._hook_list.unclaimed()
        if unclaimed:
            logger.warning(
                "The checkpoint has states of hooks that are not registered, which are left out: %s", unclaimed
            )
