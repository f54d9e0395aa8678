"""The loop, which calls the hooks. It knows nothing about models, data or optimizers."""

import logging
import sys
from collections.abc import Callable
from typing import Any, Literal

from trainkit.checkpoint.atomic import CheckpointError
from trainkit.checkpoint.checkpointer import Checkpointer
from trainkit.engine.attributes import Attributes, checkpointers_of
from trainkit.engine.run_state import EarlyEnd, Position, RunState
from trainkit.engine.stopping import StopRequests
from trainkit.evaluation.observer import EvaluationAbandoned
from trainkit.utils import comm
from trainkit.utils.env import set_rng_state
from trainkit.utils.errors import ConfigError
from trainkit.utils.events.storage import EventStorage
from trainkit.utils.logger import setup_logger
from trainkit.utils.losses import raise_failure

__all__ = ["Position", "TrainerBase"]

logger = logging.getLogger(__name__)


class TrainerBase(RunState):
    """The loop: ``run_step()`` once per iteration, with hooks around it. A subclass defines ``run_step``.

    Stage 1 of an iteration is ``before_step``, ``run_step``, and ``after_step`` of the hooks above the save point. At
    the save point the requested checkpoints are written. Stage 2 is ``after_step`` of the hooks below the save point,
    then ``after_epoch``. A resumed run starts with stage 2 of the saved iteration, or with the next iteration.

    Attributes:
        stop_check_period: if one rank is asked to stop, all ranks stop within this number of iterations.
    """

    stop_check_period = 20

    def __init__(self) -> None:
        super().__init__()
        self._stops = StopRequests()
        # requested checkpoints by name; written at the next save
        self._saves: dict[str, Callable[[], object]] = {}
        # where in an iteration the run is
        self._inside: Literal["", "stage 1", "save point", "stage 2"] = ""
        # the iteration that starts an epoch; the number done when it ends
        self._epoch_start = self._epoch_end = -1
        self._has_warned_of_save = False
        self._has_checked_state = True  # False: it is checked at the save point, see `_check_state`

    # ------------------------------------------------------------------ the loop

    def train(self, start_iter: int, max_iter: int) -> None:
        """Run the iterations ``start_iter`` (included) to ``max_iter`` (excluded); can be called again.

        If stage 2 of the iteration before ``start_iter`` is not done (after a stop, or in a loaded checkpoint), it runs
        first. SIGTERM, SIGHUP, SIGINT and, in a SLURM job, SIGUSR1 stop the run as ``request_stop`` does.

        Raises:
            ValueError: ``start_iter`` is negative or larger than ``max_iter``.
            SystemExit: after a run that was stopped by another signal than SIGINT; the code is 128 plus its number.
            KeyboardInterrupt: after a run that was stopped by SIGINT.
        """
        self._start(start_iter, max_iter)
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
                self.after_train()
        if self.status == "stopped":
            self._stops.pass_on()

    def _run_iterations(self) -> None:
        """All iterations; of the first one only stage 2, if a checkpoint or a stop has left the run there."""
        self.iter, stops, end_step = self._at, self._stops, self._step.end_step
        # the ranks agree on a stop also where the run is over anyway
        while self._stage == 2 or (
            self._early is None
            and stops.agreed(self.iter - 1) is None
            and self.iter < self.max_iter
        ):
            self.storage.iter = self.iter
            if self._stage == 1:
                self._inside = "stage 1"
                if self.iter == self._epoch_start:
                    self.before_epoch()
                self.before_step()
                self.run_step()
                self._at, self._stage = self.iter, 2
                self.after_step()
                end_step()
                self._inside = "save point"
                if not self._has_checked_state:
                    self._check_state()
                if self._saves:
                    self._write_saves()
            self._run_stage_2()
            self.iter += 1

    def _run_stage_2(self) -> None:
        self._inside, hooks, done = "stage 2", self._hook_list, self.iter + 1
        is_due = done >= hooks.due
        for call in hooks.all_below if is_due else hooks.below:
            call()
        if is_due:
            hooks.find_due(done)
        if done == self._epoch_end:
            self.after_epoch()
            self._epoch_start, self._epoch_end = done, self._find_epoch_end(done)
        self._inside, self._at, self._stage = "", done, 1
        if self._saves:  # requested in stage 2
            self._write_saves()

    def _write_saves(self) -> None:
        saves, self._saves = self._saves, {}
        self.check_finite()
        for name, save in saves.items():
            try:
                save()
            except OSError as error:  # a full disk, or a CheckpointError
                logger.error("The checkpoint %r is not saved, training continues: %s", name, error)

    def _check_state(self) -> None:
        """After the first iteration of a run: can a checkpoint hold the state? Every rank calls it; nothing is written.

        Raises:
            TypeError: it cannot, on some rank.
        """
        self._has_checked_state = True
        error = ""
        for checkpointer in checkpointers_of(self):
            if isinstance(checkpointer, Checkpointer) and not error:
                error = checkpointer.describe_unwritable()
        found = [text for text in self.gather(error) if text]
        if found:
            raise TypeError(f"checkpoints of this run cannot be written: {found[0]}")

    def run_step(self) -> None:
        """One iteration: one update of whatever is trained."""
        raise NotImplementedError(f"{type(self).__name__} must define run_step()")

    # ------------------------------------------------------------------ requests

    def request_save(self, name: str, save: Callable[[], object] | None = None) -> None:
        """Write a checkpoint at the save point, or at the end of the iteration if the save point has passed.

        Every rank calls it. Outside of iterations the checkpoint is written at once.

        Args:
            name: the name of the file, without suffix; if two hooks give the same name, it is written once.
            save: writes the file; default is ``self.checkpointer.save``.

        Raises:
            ValueError: there is neither ``save`` nor a checkpointer.
        """
        checkpointer: Any = getattr(self, "checkpointer", None)
        if save is None and checkpointer is None:
            raise ValueError(
                f"{type(self).__name__} has no checkpointer; give request_save() a function that saves"
            )
        self._saves[name] = save or (lambda: checkpointer.save(name, iteration=self.last_done_iter))
        if not self._inside:
            self._write_saves()

    def request_stop(self, reason: str, *, finished: bool = False) -> None:
        """End the run after an iteration, as "stopped", or as "finished" if it has reached its goal.

        Any rank can stop a run. It ends at most ``stop_check_period`` iterations later; with one rank, at once. With
        ``finished`` every rank must call this in the same iteration.
        """
        if not finished:
            self._stops.request(reason)
        elif self._early is None and self._stops.stop is None:  # after a stop the run goes on later
            settings = self._hook_list.settings_of_early_end()
            self._early = EarlyEnd(reason, self.max_iter, settings)

    def is_stopping(self) -> bool:
        """Whether this rank was asked to stop and may abandon an evaluation now: the update of the step is saved."""
        return self._stops.pending and (self._inside != "stage 1" or self._stage == 1)

    def check_finite(self) -> None:
        """Call before saving or evaluating, on every rank; waits for the device and for the metrics worker.

        Raises:
            FloatingPointError: on some rank the model, or the loss of an earlier step, is not finite.
        """
        self.storage.flush()
        raise_failure(self.gather(self._step.find_failure(self._ranks_agree)))

    # ------------------------------------------------------------------ start and end

    def _start(self, start_iter: int, max_iter: int) -> None:
        if not 0 <= start_iter <= max_iter:
            raise ValueError(
                f"need 0 <= start_iter <= max_iter, got start_iter={start_iter} and max_iter={max_iter}"
            )
        if start_iter != self.next_iter:
            self._move_to(start_iter)
        if self.status == "finished" or not self._stays_finished(max_iter):
            self._early = None
        self.iter, self.start_iter, self.max_iter, self.storage.iter = (
            start_iter,
            start_iter,
            max_iter,
            start_iter,
        )
        self._ranks_agree = self._hook_list.check(has_epochs=self.has_epochs)
        self._epoch_end = self._find_epoch_end(self._at)
        self._epoch_start = start_iter if self._find_epoch_end(start_iter - 1) == start_iter else -1
        self.rank_keys = self.own_keys if self._ranks_agree else ()
        self.status, self.failure, self._inside, self._saves = "running", None, "", {}
        self._has_checked_state = False
        self._stops.reset(self.stop_check_period)
        self._step.iter = start_iter  # a loader may be told its epoch before the first step
        self._step.start_run()
        for attributes in self._attributes_of_all():
            attributes.check_start()
        if not logger.hasHandlers():  # nobody has configured logging
            setup_logger(distributed_rank=comm.get_rank(), stdout_level=logging.INFO)
        logger.info("Training from iteration %d to %d", start_iter, max_iter)
        if any(hasattr(hook, "checkpointer") for hook in self.hooks) and (
            lost := self.describe_inexact()
        ):
            logger.warning(
                "A resumed run may differ from one that is never stopped: %s", "; ".join(lost)
            )

    def _move_to(self, start_iter: int) -> None:
        """Start at an iteration at which the run does not stand, with empty metrics."""
        if self.next_iter > 0:
            what = "trains iterations again" if start_iter < self.next_iter else "skips iterations"
            logger.warning(
                "This run stands at iteration %d, so train(%d, ...) %s, and its metrics start anew. To go on, call "
                "train(trainer.next_iter, max_iter)",
                self.next_iter,
                start_iter,
                what,
            )
        self._at = start_iter
        self._stage = 1
        self.storage = EventStorage()
        self._early = None
        self._rng_state = None

    def _restore_rng(self) -> None:
        if self._rng_state is not None:
            self._step.make_iterators()
            set_rng_state(self._rng_state)  # last: everything before may draw random numbers
            self._rng_state = None

    def _finish(self) -> None:
        self.check_finite()
        self.status, stop = "finished", self._stops.stop
        if self._early:
            logger.info(
                "Stopped after %d of %d iterations: %s",
                self.iter,
                self.max_iter,
                self._early.reason,
            )
            self.max_iter = self.iter
        elif stop is not None and self.iter < self.max_iter:
            logger.info(
                "Stopped after %d of %d iterations: %s", self.iter, self.max_iter, stop.reason
            )
            self.status = "stopped"

    def _abandon(self) -> None:
        """Stop the run in an evaluation, which a resumed run repeats."""
        stop = self._stops.agree_now()
        self.status, self.iter, self._inside = "stopped", self.last_done_iter + 1, ""
        reason = "" if stop is None else stop.reason
        logger.info(
            "Stopped in an evaluation, after %d of %d iterations: %s",
            self.iter,
            self.max_iter,
            reason,
        )

    def _fail(self, error: BaseException) -> None:
        self.status, self.failure = "failed", error
        self._log_failure(f"Training failed in iteration {self.iter}", error)
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
        # not Ctrl-C either
        traced = isinstance(error, Exception)
        traced = traced and not isinstance(error, ConfigError | CheckpointError)
        logger.error(
            "%s: %s: %s", what, type(error).__name__, error, exc_info=error if traced else None
        )

    def after_train(self) -> None:
        """Call ``after_train`` of every hook, even if one of them fails; then raise the first failure."""
        if self.status == "running":  # in a user's own loop
            done = self.last_done_iter + 1 >= self.max_iter
            self.status, self._inside = (
                "failed" if sys.exc_info()[0] else "finished" if done else "stopped",
                "",
            )
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
                    self.status, self.failure, first_error = "failed", error, error
        if first_error is not None:
            raise first_error

    # ------------------------------------------------------------------ points, which a user's own loop calls itself

    def before_train(self) -> None:
        if self.status != "running":
            storage = self.storage  # opened by the user's loop
            self._start(self.start_iter, self.max_iter)
            self.storage = storage
            logger.info(
                "This loop calls the hooks itself: a run that is resumed from its checkpoints is not exact"
            )
        for attributes in self._attributes_of_all():
            attributes.hand_out()
        for call in self._hook_list.calls["before_train"]:
            call()
        for attributes in self._attributes_of_all():
            attributes.finish_loading()

    def _attributes_of_all(self) -> list[Attributes]:
        """Those of this trainer, and of the one that makes its steps."""
        if self._step is self:
            return [self._attributes]
        return [self._attributes, self._step._attributes]

    def before_step(self) -> None:
        if not self._inside:
            self._restore_rng()
            self.storage.iter = self._at = self.iter
            self._stage = 1
        for call in self._hook_list.calls["before_step"]:
            call()

    def after_step(self) -> None:
        """Call the hooks above the save point; in a user's own loop, complete the iteration too."""
        own_loop = not self._inside
        if own_loop:
            self._inside, self._at, self._stage = "stage 1", self.iter, 2
        hooks = self._hook_list
        for call in hooks.all_above if self.iter + 1 >= hooks.due else hooks.above:
            call()
        if own_loop:
            self._step.end_step()
            self._inside = "save point"
            if not self._has_checked_state:
                self._check_state()
            if self._saves:
                self._write_saves()
            self._run_stage_2()

    def before_save(self, state: dict[str, Any]) -> None:
        """Like ``after_load``: called by the `Checkpointer` that saves this trainer."""
        if self._inside.startswith("stage") and not self._has_warned_of_save:
            self._has_warned_of_save = True
            logger.warning(
                "A hook saves a checkpoint itself, in iteration %d; a run resumed from it is not exact. Call "
                "trainer.request_save(name), so that the trainer saves at the save point",
                self.iter,
            )
        for call in self._hook_list.calls["before_save"]:
            call(state)
