"""The position of a run, and its state in a checkpoint."""

import logging
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from trainkit.engine.finite import raise_failure
from trainkit.engine.hook_base import HookBase
from trainkit.engine.hook_points import HookPoints
from trainkit.utils import comm
from trainkit.utils.events import EventStorage
from trainkit.utils.periods import say_done
from trainkit.utils.rng import get_rng_state, rng_state_for_rank

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Status: TypeAlias = Literal["not started", "running", "finished", "stopped", "failed"]


class Position(NamedTuple):
    """The position of a run: stage 1 of an iteration (its update is not done) or stage 2 (it is done)."""

    iteration: int
    stage: Literal[1, 2]


class RunState(HookPoints):
    """Hooks, storage, random state, and the position in the run.

    Attributes:
        iter: the current iteration, from 0; during ``after_step`` the one just done, after a finished run ``max_iter``.
        start_iter, max_iter: the first iteration of this ``train()``, and the one with which it ends, not included.
        storage: the `EventStorage` that is open during ``train()``.
        status: "not started", "running", "finished", "stopped" (by ``request_stop``) or "failed".
        position: the position of the run, as in a checkpoint.
        own_keys: the entries of the state that each rank has for itself.
        rank_keys: the ``own_keys`` that a save gathers from all ranks; empty if not all ranks save.
        logical_ranks: the number of logical ranks, see `trainkit.utils.logical`; 0: each process is a rank.
    """

    own_keys: tuple[str, ...] = ("hooks", "storage", "rng")
    logical_ranks = 0

    def __init__(self) -> None:
        super().__init__()
        self._early: tuple[str, int] | None = None  # why the run has finished early, and its former max_iter
        self._is_before_step_done = False  # True after a stop during the wait for this iteration's batch
        self._rng_state: dict[str, Any] | None = None  # of a checkpoint; restored after all iterators exist
        self._ranks_agree = True
        self.rank_keys = self.own_keys
        self.position = Position(0, 1)
        self.iter = self.start_iter = self.max_iter = 0
        self.storage = EventStorage()
        self.status: Status = "not started"

    def _begin_anew(self, start_iter: int) -> None:
        self.position, self.storage = Position(start_iter, 1), EventStorage()
        self._early, self._rng_state, self._is_before_step_done = None, None, False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({say_done(self.last_done_iter + 1, self.max_iter)}, {self.status})"

    def next_iter_of(self, hook: HookBase) -> int:
        """In ``before_train``: the next iteration in which this hook's ``after_step`` is called.

        It is ``start_iter``; for a hook below the save point ``start_iter - 1``, if stage 2 of that is not done.
        """
        return self.position.iteration if self._hook_list.is_below(hook) else self.start_iter

    @property
    def last_done_iter(self) -> int:
        """The last iteration whose update is done; -1 if there is none."""
        return self.position.iteration - (self.position.stage == 1)

    def check_finite(self) -> None:
        """Call before saving or evaluating, on every rank; waits for the device and for the metrics worker.

        Raises:
            FloatingPointError: on some rank the model, or the loss or gradients of an earlier step, are not finite.
        """
        self.storage.flush()
        raise_failure(self.gather(self.find_failure(self._ranks_agree)))

    def find_failure(self, everywhere: bool = True) -> str | None:
        """A description of values that are not finite on this rank; None if there are none.

        Args:
            everywhere: every rank calls it, so it may exchange values with the others.
        """
        return None

    def gather(self, value: _T) -> list[_T]:
        """The ``value`` of every rank; only this rank's if ranks have different hooks, since not all may call it."""
        return comm.all_gather(value) if self._ranks_agree else [value]

    def describe_inexact(self) -> list[str]:
        """The reasons why a resumed run of this trainer may differ; empty if it continues bit for bit."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """The position, and the states of hooks (by unique names), storage and random generators.

        ``iteration`` is the last one whose update is done; ``stage`` is 2 if its stage 2 is not done.
        """
        reason, max_iter = self._early or (None, self.max_iter)
        return {
            "iteration": self.last_done_iter,
            "position": {
                "stage": self.position.stage,
                "max_iter": max_iter,
                "finished_early": reason,
                "before_step_done": self._is_before_step_done,
            },
            "world_size": self.logical_ranks or comm.get_data_world_size(),
            "hooks": self._hook_list.state_dict(),
            "storage": self.storage.state_dict(),
            "rng": self._rng_state or get_rng_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state with the next ``train()``; states of hooks that are registered later wait for them.

        Missing entries, as in files of detectron2, are ignored.
        """
        self._hook_list.load_state_dict(state_dict.get("hooks", {}))
        if self.status == "running":  # a hook has restored the model; the run keeps its position
            return
        iteration, saved = state_dict["iteration"], state_dict.get("position", {"stage": 1, "finished_early": None})
        if not isinstance(iteration, int) or iteration < -1:
            raise TypeError(f"the iteration of a saved run must be a whole number >= -1, got {iteration!r}")
        self.position = Position(iteration + (saved["stage"] == 1), saved["stage"])
        self.iter, self.start_iter, self.status = iteration, iteration + 1, "not started"
        reason = saved["finished_early"]
        self._early = None if reason is None else (reason, saved["max_iter"])
        self._is_before_step_done = saved.get("before_step_done", False)
        self.max_iter = self.max_iter or saved.get("max_iter", 0)  # a config's max_iter is preferred
        if "position" not in state_dict and "hooks" in state_dict:
            logger.warning(
                "The checkpoint was written by an earlier version of trainkit: what hooks had yet to do in iteration "
                "%d (an evaluation, a line of metrics) is not done",
                iteration,
            )
        self.storage = EventStorage()
        if state_dict.get("storage"):
            self.storage.load_state_dict(state_dict["storage"])
        present = self.logical_ranks or comm.get_data_world_size()
        self._rng_state = rng_state_for_rank(state_dict.get("rng"), state_dict.get("world_size", 1), present, iteration)
