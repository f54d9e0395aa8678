"""TrainerBase: the loop, which calls the hooks.

It trains nothing itself: models, data and optimizers belong to subclasses.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor, nn

from trainkit.checkpoint.checkpointer import Checkpointer
from trainkit.checkpoint.errors import CheckpointError, loading
from trainkit.checkpoint.optimizer_groups import names_in
from trainkit.engine.attributes import Attributes, checkpointers_of, stateful_attributes
from trainkit.engine.finite import raise_failure
from trainkit.engine.hook_base import HookBase
from trainkit.engine.hook_list import Anchor, HookList
from trainkit.engine.stopping import StopRequests
from trainkit.evaluation.observer import EvaluationAbandoned, Phase
from trainkit.utils import comm
from trainkit.utils.env import (
    check_rng_state,
    get_rng_state,
    rng_state_for_rank,
    set_rng_state,
)
from trainkit.utils.errors import ConfigError
from trainkit.utils.events.storage import (
    EventStorage,
    other_threads_have_storages,
    storage_of_thread,
)
from trainkit.utils.logger import setup_logger
from trainkit.utils.periods import check_period, periods_done, say_done

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class EarlyEnd(NamedTuple):
    """A run that has reached its goal before ``max_iter``.

    ``settings`` are those of the hooks that decide on this, see `HookBase.settings_of_early_end`.
    With other settings, or a larger ``max_iter``, the run goes on.
    """

    reason: str
    max_iter: int
    settings: dict[str, Any]


class TrainerBase:
    """The loop: ``run_step()`` once per iteration, with hooks around it.

    A subclass defines ``run_step``.

    The position of a run is one number: the updates that are done. After an update come the hooks
    above the save point, then the save point, where the requested checkpoints are written, then the
    boundary: the hooks below the save point (evaluation, best checkpoint, early stopping, writers),
    and the end of an epoch. A resumed run starts with the boundary of its last update. A hook that
    has returned there is not called again, also not after a resume.

    A loop of the user's own may call the points itself (``before_train``, ``before_step``,
    ``run_step``, ``after_step``, ``after_train``), as in code for detectron2. Then ``after_step``
    completes the iteration.

    Attributes:
        done: the number of updates that are done; ``train(trainer.next_iter, max_iter)`` goes on
            from there.
        iter: the current iteration, from 0; in ``after_step`` the one just done; after a finished
            run ``max_iter``.
        start_iter, max_iter: this ``train()`` runs iterations ``start_iter`` to ``max_iter - 1``.
        boundary_done: the number of updates whose boundary is over; ``done``, or one less.
        storage: the `EventStorage` that is open during ``train()``.
        status: "not started", "running", "finished", "stopped" (by ``request_stop``) or "failed".
        failure: the error with which the run has failed, or None.
        history_length: the number of values that the storage keeps of each scalar, set before
            training.
        stop_check_period: if one rank is asked to stop, all ranks stop within this number of
            iterations.
        own_keys: the entries of the state that each rank has for itself; the storage is that of
            rank 0 after a resume.
        rank_keys: the ``own_keys`` that a save gathers from all ranks; empty if not all ranks save.
        unsaved: names of attributes that checkpoints do not hold, such as ``("teacher",)``. They
            hold every other optimizer, schedule, gradient scaler and module that is a public
            attribute, or in a list, tuple or dict that is one.
    """

    history_length = 10_000
    stop_check_period = 20
    own_keys: tuple[str, ...] = ("hooks", "boundary", "rng")
    # a checkpoint leaves out what it cannot hold; the states in these entries one by one
    separate_states = ("hooks", "attributes", "_trainer", "_trainer.attributes")
    unsaved: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.iter = self.start_iter = self.max_iter = 0
        self.done = self.boundary_done = 0
        self.storage = EventStorage(history_length=self.history_length)
        self.status: Literal["not started", "running", "finished", "stopped", "failed"] = (
            "not started"
        )
        self.failure: BaseException | None = None
        self.rank_keys = self.own_keys
        # weak references, since a strong one would keep the trainer alive
        self._hook_list = HookList(weakref.proxy(self))
        self._attributes = Attributes(weakref.proxy(self))
        self._stops = StopRequests()
        self._early: EarlyEnd | None = None
        self._saves: dict[str, Callable[[], object]] = {}  # requested checkpoints by name
        # names of the calls that have returned in the boundary that is not over yet
        self._passed: set[str] = set()
        self._is_in_train = False  # False: a loop of the user's own calls the points
        self._inside: Literal["", "step", "boundary"] = ""
        # the iteration that starts an epoch; the number of updates after which it ends
        self._epoch_start = self._epoch_end = -1
        # from a checkpoint; restored after all iterators exist
        self._rng_state: dict[str, Any] | None = None
        self._ranks_agree = True  # whether all ranks have the same hooks
        self._has_warned_of_save = False
        self._has_checked_iteration = True  # False: the next save point checks the first iteration

    def __repr__(self) -> str:
        return f"{type(self).__name__}({say_done(self.done, self.max_iter or None)}, {self.status})"

    # ------------------------------------------------------------------ the loop

    def train(self, start_iter: int, max_iter: int) -> None:
        """Run the iterations ``start_iter`` (included) to ``max_iter`` (excluded).

        It can be called again.
        SIGTERM, SIGHUP, SIGINT and, in a SLURM job, SIGUSR1 stop the run as ``request_stop`` does.

        Raises:
            ValueError: ``start_iter`` is negative or larger than ``max_iter``.
            SystemExit: after a run that was stopped by another signal than SIGINT; the code is 128
                plus its number.
            KeyboardInterrupt: after a run that was stopped by SIGINT.
        """
        self._start(start_iter, max_iter)
        self._is_in_train = True
        with self._stops.listening(), self.storage:
            try:
                self.before_train()
                self._restore_rng()
                self._run_iterations()
                self._finish()
            except EvaluationAbandoned:
                self._abandon()
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._is_in_train = False
                self.after_train()
        if self.status == "stopped":
            self._stops.pass_on(say_done(self.done, self.max_iter))

    def _run_iterations(self) -> None:
        while True:
            self._boundary()
            if self._should_end():
                break
            self._begin_iteration(self.done)
            self.before_step()
            self.run_step()
            self.done += 1
            self.after_step()
            self._save_point()
        self.iter = self.done

    def _begin_iteration(self, iter: int) -> None:
        self._inside = "step"
        self.iter = self.storage.iter = iter
        if iter == self._epoch_start:
            self.before_epoch()

    def run_step(self) -> None:
        """One iteration: one update of whatever is trained."""
        raise NotImplementedError(f"{type(self).__name__} must define run_step()")

    def _save_point(self) -> None:
        """Write the checkpoints that hooks asked for.

        After it nobody can read the batch and the losses of the iteration.
        """
        if not self._has_checked_iteration:
            self._check_first_iteration()
            self._has_checked_iteration = True
        self._inner.end_step()
        self._inside = ""
        if self._saves:
            self._write_saves()

    def _boundary(self) -> None:
        """Call the hooks below the save point, once each.

        After an update, or before the first one of a resumed run.
        """
        if self.boundary_done == self.done:
            return
        self._inside = "boundary"
        self.iter = self.storage.iter = self.done - 1
        self._call_once(self._hook_list.boundary)
        if self.done == self._epoch_end:
            self.after_epoch()
            self._find_epoch(self.done)
        self.boundary_done = self.done
        self._passed.clear()
        self._inside = ""
        if self._saves:
            self._write_saves()

    def _call_once(self, calls: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Call those that have not returned yet in this boundary."""
        for name, call in calls:
            if name not in self._passed:
                call()
                self._passed.add(name)

    def _should_end(self) -> bool:
        """Every rank asks after each step, the last one too, so that they agree on a stop."""
        if self._early is not None:
            return True
        is_stopped = self._stops.agreed(self.done) is not None
        return is_stopped or self.done >= self.max_iter

    def _write_saves(self) -> None:
        saves = self._saves
        self._saves = {}
        self.check_finite()
        for name, save in saves.items():
            try:
                save()
            except OSError as error:  # a full disk, or a CheckpointError
                logger.error("The checkpoint %r is not saved, training continues: %s", name, error)

    def _check_first_iteration(self) -> None:
        """Checks after the first iteration: can a checkpoint hold the state of this rank?

        Nothing is written.
        Nothing is exchanged either, since DDP may still have to raise an error, see
        `comm.create_side_groups`.

        Raises:
            TypeError: it cannot.
        """
        for checkpointer in checkpointers_of(self):
            if isinstance(checkpointer, Checkpointer):
                error = checkpointer.describe_unwritable()
                if error:
                    raise TypeError(f"checkpoints of this run cannot be written: {error}")

    # ------------------------------------------------------------------ the trainer of the steps
    # The loop calls these methods of `_inner`. A trainer with a model and data overrides them.

    @property
    def _inner(self) -> "TrainerBase":
        """The trainer that makes the steps: this one, or that inside a `DefaultTrainer`."""
        return self

    def share_run(self, owner: "TrainerBase") -> None:
        """Become the `_inner` of ``owner``, whose hooks are then called."""
        self._hook_list = owner._hook_list
        if type(owner).after_backward is not TrainerBase.after_backward:
            outer = weakref.proxy(owner)
            self.after_backward = lambda: outer.after_backward()  # type: ignore[method-assign]

    def acts_after_backward(self) -> bool:
        """Whether a hook or a subclass does anything in ``after_backward``."""
        # `share_run` sets a function, which has no __func__
        function = getattr(self.after_backward, "__func__", None)
        is_overridden = function is not TrainerBase.after_backward
        return is_overridden or bool(self._hook_list.at["after_backward"])

    def start_run(self) -> None:
        """Forget the steps of an earlier run; called when a run starts."""

    def make_iterators(self) -> None:
        """Create the data iterators.

        Called before random state is restored, since a loader may draw random numbers.
        """

    def end_step(self) -> None:
        """Release what only hooks above the save point may read."""

    def before_check(self, ranks_agree: bool) -> None:
        """Called before each `check_finite`.

        Args:
            ranks_agree: whether every rank calls it, so that they may exchange.
        """

    def find_failure(self) -> str | None:
        """What is not finite in the model on this rank, or None."""

    # ------------------------------------------------------------------ requests

    def request_save(self, name: str, save: Callable[[], object] | None = None) -> None:
        """Ask for a checkpoint; every rank calls it.

        It is written at the save point; if that has passed, at the end of the boundary; outside of
        iterations, at once.

        Args:
            name: the name of the file, without suffix; if two hooks give the same name, it is
                written once.
            save: writes the file; default is ``self.checkpointer.save``.

        Raises:
            ValueError: there is neither ``save`` nor a checkpointer.
        """
        checkpointer: Any = getattr(self, "checkpointer", None)
        if save is None and checkpointer is None:
            raise ValueError(
                f"{type(self).__name__} has no checkpointer; give request_save() a function that "
                "saves"
            )
        self._saves[name] = save or (lambda: checkpointer.save(name, iteration=self.done - 1))
        if not self._inside:
            self._write_saves()

    def request_stop(self, reason: str, *, finished: bool = False) -> None:
        """End the run after an iteration.

        Its status is then "stopped", or "finished" if it has reached its goal.
        Any rank can stop a run. It ends at most ``stop_check_period`` iterations later; with one
        rank, at once. With ``finished`` every rank must call this in the same iteration.
        """
        if not finished:
            self._stops.request(reason)
        elif self._early is None and self._stops.stop is None:  # after a stop the run goes on later
            settings = self._hook_list.settings_of_early_end()
            self._early = EarlyEnd(reason, self.max_iter, settings)

    def is_stopping(self) -> bool:
        """Whether this rank was asked to stop and may abandon an evaluation now.

        Then no update is lost.
        """
        return self._stops.pending and self._inside != "step"

    def check_finite(self) -> None:
        """Call before saving or evaluating, on every rank.

        Waits for the device and for the metrics worker.

        Raises:
            FloatingPointError: on some rank the model, or the loss of an earlier step, is not
                finite.
            ConfigError: a module among the attributes differs between ranks.
        """
        self.storage.flush()
        if self._ranks_agree:
            for attributes in self._attributes_of_all():
                attributes.compare_ranks()
        # a subclass with its own `run_step` may not have set it
        self._inner.iter = self.iter
        self._inner.before_check(self._ranks_agree)
        raise_failure(self.gather(self._inner.find_failure()))

    def gather(self, value: _T) -> list[_T]:
        """The ``value`` of every rank.

        Only this rank's if ranks have different hooks, since then not all may call it.
        """
        return comm.all_gather(value) if self._ranks_agree else [value]

    # ------------------------------------------------------------------ start and end

    def _start(self, start_iter: int, max_iter: int) -> None:
        for name, value in {"start_iter": start_iter, "max_iter": max_iter}.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(
                    f"train() takes numbers of iterations, got {name}={value!r}; 3 epochs are "
                    "round(3 * trainer.epoch_length), and a config takes SOLVER.MAX_ITER 3ep"
                )
        if not 0 <= start_iter <= max_iter:
            raise ValueError(
                f"need 0 <= start_iter <= max_iter, got start_iter={start_iter} and "
                f"max_iter={max_iter}"
            )
        self._set_position(start_iter, max_iter)
        comm.create_side_groups()
        self._ranks_agree = self._hook_list.check(has_epochs=self.has_epochs)
        self.rank_keys = self.own_keys if self._ranks_agree else ()
        self._find_epoch(self.boundary_done)
        self._forget_last_run()
        self._inner.iter = start_iter  # a loader may be told its epoch before the first step
        self._inner.start_run()
        for attributes in self._attributes_of_all():
            attributes.check_start()
        if not logger.hasHandlers():  # nobody has configured logging
            setup_logger(distributed_rank=comm.get_rank(), stdout_level=logging.INFO)
        logger.info("Training starts %s", say_done(start_iter, max_iter))
        self._warn_of_inexact()

    def _set_position(self, start_iter: int, max_iter: int) -> None:
        if start_iter != self.done:
            self._move_to(start_iter)
        if self.status == "finished" or not self._stays_finished(max_iter):
            self._early = None
        self.iter = self.start_iter = self.storage.iter = start_iter
        self.max_iter = max_iter

    def _forget_last_run(self) -> None:
        self.status = "running"
        self.failure = None
        self._inside = ""
        self._saves = {}
        self._has_checked_iteration = False
        self._stops.reset(self.stop_check_period)

    def _move_to(self, start_iter: int) -> None:
        """Start at another iteration than the next one of this run, with empty metrics."""
        if self.done > 0:
            what = "trains iterations again" if start_iter < self.done else "skips iterations"
            logger.warning(
                "This run has done %d iterations, so train(%d, ...) %s, and its metrics start "
                "anew. To go on, call train(trainer.next_iter, max_iter)",
                self.done,
                start_iter,
                what,
            )
        self.done = self.boundary_done = start_iter
        self._passed.clear()
        self.storage = EventStorage(history_length=self.history_length)
        self._early = None
        self._rng_state = None

    def _warn_of_inexact(self) -> None:
        saves = any(hasattr(hook, "checkpointer") for hook in self.hooks)
        reasons = self.describe_inexact() if saves else []
        if reasons:
            logger.warning(
                "A resumed run may differ from one that is never stopped: %s", "; ".join(reasons)
            )

    def _restore_rng(self) -> None:
        if self._rng_state is not None:
            self._inner.make_iterators()
            set_rng_state(self._rng_state)  # last: everything before may draw random numbers
            self._rng_state = None

    def _finish(self) -> None:
        self.check_finite()
        self.status = "finished"
        stop = self._stops.stop
        if self._early is not None:
            self._log_stop(self._early.reason)
            self.max_iter = self.iter
        elif stop is not None and self.iter < self.max_iter:
            self._log_stop(stop.reason)
            self.status = "stopped"

    def _log_stop(self, reason: str, where: str = "") -> None:
        logger.info(
            "Stopped%s after %d of %d iterations: %s", where, self.iter, self.max_iter, reason
        )

    def _abandon(self) -> None:
        """Stop the run in an evaluation, which a resumed run repeats."""
        stop = self._stops.agree_now()
        self.status = "stopped"
        self.iter = self.done
        self._inside = ""
        self._log_stop("" if stop is None else stop.reason, " in an evaluation,")

    def _fail(self, error: BaseException) -> None:
        self.status = "failed"
        self.failure = error
        done = say_done(self.done, self.max_iter)
        what = f"Training failed {done} (in iteration {self.iter}, counted from 0)"
        # the error is raised again, so its traceback is for the log file only
        logger.error("%s: %s: %s", what, type(error).__name__, error)
        logger.debug("%s", what, exc_info=error)
        try:
            self.storage.flush()
        except Exception as later:
            self._log_failure("Storing or writing metrics failed as well", later)
        for hook in self._hook_list.at["after_failure"]:
            try:
                hook.after_failure(error)
            except Exception as later:
                self._log_failure(f"{type(hook).__name__} failed in after_failure", later)
        self._inside = ""

    @staticmethod
    def _log_failure(what: str, error: BaseException) -> None:
        # the message of these says all; Ctrl-C is no Exception
        needs_traceback = isinstance(error, Exception) and not isinstance(
            error, ConfigError | CheckpointError
        )
        exc_info = error if needs_traceback else None
        logger.error("%s: %s: %s", what, type(error).__name__, error, exc_info=exc_info)

    # ------------------------------------------------------------------ points
    # A loop of the user's own calls them itself; then `_is_in_train` is False.

    def before_train(self) -> None:
        if self.status != "running":
            storage = self.storage  # opened by the user's loop
            self._start(self.start_iter, self.max_iter)
            self.storage = storage
            logger.info(
                "This loop calls the hooks itself: a run that is resumed from its checkpoints is "
                "not exact"
            )
        for attributes in self._attributes_of_all():
            attributes.hand_out()
        for hook in self._hook_list.at["before_train"]:
            hook.before_train()
        for attributes in self._attributes_of_all():
            attributes.finish_loading()

    def before_step(self) -> None:
        if not self._is_in_train:
            self._restore_rng()
            self.done = self.boundary_done = self.iter
            self._passed.clear()
            self._begin_iteration(self.iter)
        for hook in self._hook_list.at["before_step"]:
            hook.before_step()

    def after_step(self) -> None:
        """Call the hooks above the save point; in a user's own loop, complete the iteration too."""
        if not self._is_in_train:
            self.done = self.iter + 1
        for hook in self._hook_list.at["after_step"]:
            hook.after_step()
        if not self._is_in_train:
            self._save_point()
            self._boundary()

    def after_train(self) -> None:
        """Call ``after_train`` of every hook, even if one of them fails.

        Then raise the first failure.
        """
        if self.status == "running":  # in a user's own loop
            self._end_own_loop()
        self.storage.iter = self.iter
        calls = [
            (f"{type(hook).__name__} failed", hook.after_train)
            for hook in self._hook_list.at["after_train"]
        ]
        first_error: BaseException | None = None
        for name, call in [*calls, ("Storing or writing metrics failed", self.storage.flush)]:
            try:
                call()
            except EvaluationAbandoned:
                self._abandon()
            except BaseException as error:
                self._log_failure(f"{name} in after_train", error)
                if self.status != "failed":  # otherwise the earlier failure is raised
                    self.status = "failed"
                    self.failure = first_error = error
        if first_error is not None:
            raise first_error

    def _end_own_loop(self) -> None:
        self._inside = ""
        if sys.exc_info()[0] is not None:
            self.status = "failed"
        elif self.done >= self.max_iter:
            self.status = "finished"
        else:
            self.status = "stopped"

    def before_epoch(self) -> None:
        for hook in self._hook_list.at["before_epoch"]:
            hook.before_epoch()

    def after_epoch(self) -> None:
        self._call_once(self._hook_list.epoch_end)

    def after_backward(self) -> None:
        """A trainer's own ``run_step`` calls it between the gradients and the update."""
        for hook in self._hook_list.at["after_backward"]:
            hook.after_backward()

    def before_eval(self, phase: Phase, name: str) -> None:
        for hook in self._hook_list.at["before_eval"]:
            hook.before_eval(phase, name)

    def before_eval_step(self, phase: Phase, index: int, inputs: Any) -> None:
        for hook in self._hook_list.at["before_eval_step"]:
            hook.before_eval_step(phase, index, inputs)

    def after_eval_step(self, phase: Phase, index: int, inputs: Any, outputs: Any) -> None:
        for hook in self._hook_list.at["after_eval_step"]:
            hook.after_eval_step(phase, index, inputs, outputs)

    def after_eval(self, phase: Phase, name: str, results: Mapping[str, Any]) -> None:
        for hook in self._hook_list.at["after_eval"]:
            hook.after_eval(phase, name, results)

    def before_save(self, state: dict[str, Any]) -> None:
        """Called by the `Checkpointer` that saves this trainer; so is ``after_load``."""
        if self._inside and not self._has_warned_of_save:
            self._has_warned_of_save = True
            logger.warning(
                "A hook saves a checkpoint itself, %s; a run resumed from it is not "
                "exact. Call trainer.request_save(name), so that the trainer saves at the save "
                "point",
                say_done(self.done),
            )
        for hook in self._hook_list.at["before_save"]:
            hook.before_save(state)

    def after_load(self, state: dict[str, Any]) -> None:
        for hook in self._hook_list.at["after_load"]:
            hook.after_load(state)

    # ------------------------------------------------------------------ hooks

    def register_hooks(
        self,
        hooks: Iterable[HookBase | None],
        *,
        priority: int | str | None = None,
        before: Anchor | None = None,
        after: Anchor | None = None,
    ) -> None:
        """Add hooks after those with the same or a lower ``priority`` number.

        Entries that are None are skipped.

        Args:
            priority: 0 (first) to 100 (last), or a name of `Priority`; default is each hook's own.
                With a number above `SAVE_POINT` hooks run below the save point.
            before, after: a registered hook, its class, or the name of its class: the new hooks are
                placed next to it.

        Raises:
            TypeError: an entry is not a `HookBase` object, or a method of it does not take the
                arguments of its point.
            ValueError: a hook is already registered; the priority is out of range; more than one of
                priority, before and after is given; the anchor is absent or matches several hooks.
        """
        self._hook_list.add(hooks, priority, before, after)

    @property
    def hooks(self) -> Sequence[HookBase]:
        """The registered hooks, in their order."""
        return tuple(self._hook_list.hooks)

    @property
    def _hooks(self) -> list[HookBase]:
        """The list itself, for users of detectron2 who change its order by hand."""
        return self._hook_list.hooks

    @_hooks.setter
    def _hooks(self, hooks: list[HookBase]) -> None:
        self._hook_list.hooks = hooks
        self._hook_list.update()

    def describe_hooks(self) -> str:
        """The hooks of each point in their order.

        One line per point, and one for the save point.
        """
        self._hook_list.update()
        return self._hook_list.describe()

    def next_iter_of(self, hook: HookBase) -> int:
        """In ``before_train``: the next iteration in which this hook's ``after_step`` is called.

        It is ``start_iter``, or the one before for a hook below the save point whose call is still
        to come.
        """
        is_over = self.boundary_done == self.done
        if is_over or not self._hook_list.is_below(hook):
            return self.done
        return self.done if self._hook_list.name_of_call(hook) in self._passed else self.done - 1

    # ------------------------------------------------------------------ the position of the run

    def is_training(self) -> bool:
        return self.status == "running"

    @property
    def next_iter(self) -> int:
        """The iteration with which ``train()`` goes on: at first 0."""
        return self.done

    @property
    def ends_early(self) -> bool:
        """Whether this run has reached its goal before ``max_iter``: no iteration follows."""
        return self._early is not None

    def _stays_finished(self, max_iter: int) -> bool:
        """Whether a run that has finished early has nothing to do up to ``max_iter``."""
        return (
            self._early is not None
            and max_iter <= self._early.max_iter
            and self._early.settings == self._hook_list.settings_of_early_end()
        )

    def storage_in_use(self) -> EventStorage:
        """``storage``; or the one that a loop of the user's own has opened in its place."""
        opened = storage_of_thread()
        if self.storage.is_open or opened is None:
            return self.storage
        return opened

    @property
    def iters_per_epoch(self) -> int:
        """Iterations per pass over the training data, rounded.

        A subclass that knows its data overrides this. Raises ValueError if there are no epochs.
        """
        raise ValueError(
            f"{type(self).__name__} does not define iters_per_epoch, so it has no epochs; use "
            "iterations"
        )

    @property
    def epoch_length(self) -> int | Fraction:
        """Iterations per pass over the training data, not rounded.

        n epochs are ``round(n * epoch_length)`` iterations. Raises as `iters_per_epoch`.
        """
        return self.iters_per_epoch

    @property
    def has_epochs(self) -> bool:
        try:
            return self.iters_per_epoch > 0
        except ValueError:
            return False

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return periods_done(self.iter, self.epoch_length)

    def _find_epoch(self, done: int) -> None:
        """Find the end of the epoch after ``done`` updates.

        Also whether this epoch starts with the next iteration.
        """
        self._epoch_start = self._epoch_end = -1
        if not self.has_epochs:
            return
        length = self.epoch_length
        number = periods_done(done, length)
        self._epoch_end = round((number + 1) * length)
        if done == round(number * length):
            self._epoch_start = done

    # ------------------------------------------------------------------ state

    def _attributes_of_all(self) -> list[Attributes]:
        """Those of this trainer, and of the one that makes its steps."""
        if self._inner is self:
            return [self._attributes]
        return [self._attributes, self._inner._attributes]

    def describe_inexact(self) -> list[str]:
        """The reasons why a resumed run may differ; empty if it continues bit for bit."""
        reasons = []
        if other_threads_have_storages():
            reasons.append(
                "another thread of this process trains too, and both use the same random generators"
            )
        private = self._attributes.private()
        if private:
            reasons.append(
                f"attributes that start with an underscore are not saved: {', '.join(private)}"
            )
        return reasons

    def saved_objects(self) -> Sequence[Any]:
        """What a checkpoint holds in an entry of its own; it is not saved as an attribute again."""
        return ()

    def parameter_names(self) -> dict[str, Tensor]:
        """name -> parameter, of the modules of this trainer.

        The states of optimizers find their parameters by these names. `saved_objects` have names of
        their own.
        """
        saved = self.saved_objects()
        modules = {}
        for name, value in stateful_attributes(self).items():
            if isinstance(value, nn.Module) and all(value is not other for other in saved):
                modules[f"{name}."] = value
        return names_in(modules)

    def state_dict(self) -> dict[str, Any]:
        """The position, and the states of hooks, attributes, storage and random generators.

        ``iteration`` is the last one whose update is done.
        """
        early = self._early
        return {
            "iteration": self.done - 1,
            "boundary": {
                "is_over": self.boundary_done == self.done,
                "passed": sorted(self._passed),
            },
            "end": {
                "max_iter": self.max_iter if early is None else early.max_iter,
                "finished_early": None if early is None else early.reason,
                "settings_of_early_end": {} if early is None else early.settings,
            },
            "world_size": comm.get_data_world_size(),
            "hooks": self._hook_list.state_dict(),
            "storage": self.storage.state_dict(),
            "rng": self._rng_state or get_rng_state(),
            **self._attributes.state_dict(),
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Called before anything is loaded; nothing is changed.

        Raises CheckpointError if a state does not fit.
        """
        self._attributes.check(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state with the next ``train()``.

        Files of detectron2 have only some of the entries.
        """
        self._hook_list.load_state_dict(state_dict.get("hooks", {}))
        self._attributes.load_state_dict(state_dict)
        if self.status == "running":  # a hook has restored the model; the run keeps its position
            return
        iteration = check_period("iteration", state_dict["iteration"], minimum=-1)
        self.iter = iteration
        self.start_iter = self.done = iteration + 1
        with loading("the boundary"):
            self._load_boundary(state_dict.get("boundary", {"is_over": True, "passed": []}))
        self.status = "not started"
        self._early = None
        end = state_dict.get("end", {"max_iter": 0, "finished_early": None})
        check_period("max_iter", end["max_iter"])
        if end["finished_early"] is not None:
            self._early = EarlyEnd(
                end["finished_early"], end["max_iter"], end["settings_of_early_end"]
            )
        # max_iter from a config comes first
        self.max_iter = self.max_iter or end["max_iter"]
        self.storage = EventStorage(history_length=self.history_length)
        with loading("the storage"):
            if state_dict.get("storage"):
                self.storage.load_state_dict(state_dict["storage"])
        with loading("the random state"):
            self._load_rng_state(state_dict)

    def _load_boundary(self, state: Mapping[str, Any]) -> None:
        is_over, passed = state["is_over"], state["passed"]
        if not isinstance(is_over, bool):
            raise TypeError(f"is_over must be True or False, got {is_over!r}")
        if not isinstance(passed, list) or not all(isinstance(name, str) for name in passed):
            raise TypeError(f"passed must be a list of names, got {passed!r}")
        self.boundary_done = self.done if is_over else self.done - 1
        self._passed = set(passed)

    def _load_rng_state(self, state_dict: Mapping[str, Any]) -> None:
        saved = state_dict.get("rng")
        if saved is not None:
            check_rng_state(saved)
        saved_world_size = check_period("world_size", state_dict.get("world_size", 1), minimum=1)
        world_size = comm.get_data_world_size()
        self._rng_state = rng_state_for_rank(saved, saved_world_size, world_size, self.iter)
