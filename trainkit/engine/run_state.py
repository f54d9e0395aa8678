"""A run: its hooks, its position, and its state in a checkpoint."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor, nn

from trainkit.checkpoint.atomic import loading
from trainkit.checkpoint.optimizer_state import names_in
from trainkit.engine.attributes import Attributes, stateful_attributes
from trainkit.engine.hook_base import HookBase
from trainkit.engine.hook_list import Anchor, HookList
from trainkit.utils import comm
from trainkit.utils.env import check_rng_state, get_rng_state, rng_state_for_rank
from trainkit.utils.events.storage import (
    EventStorage,
    other_threads_have_storages,
    storage_of_thread,
)
from trainkit.utils.periods import check_period, periods_done, say_done

_T = TypeVar("_T")


class Position(NamedTuple):
    """The position of a run: stage 1 of an iteration (its update is not done) or stage 2 (it is done)."""

    iteration: int
    stage: int


def _point(name: str) -> Any:
    """A method that calls the hooks of a point; a trainer class may override it."""

    def call(self: "RunState", *args: Any) -> None:
        for method in self._hook_list.calls[name]:
            method(*args)

    return call


class EarlyEnd(NamedTuple):
    """A run that has reached its goal before ``max_iter``.

    ``settings`` are those of the hooks that decide on this, see `HookBase.settings_of_early_end`. With other settings,
    or a larger ``max_iter``, the run goes on.
    """

    reason: str
    max_iter: int
    settings: dict[str, Any]


class RunState:
    """The part of a trainer that outlives an iteration: hooks, storage, random state, and the position in the run.

    Attributes:
        iter: the current iteration, from 0; in ``after_step`` the one just done; after a finished run ``max_iter``.
        start_iter, max_iter: this ``train()`` runs iterations ``start_iter`` to ``max_iter - 1``.
        storage: the `EventStorage` that is open during ``train()``.
        status: "not started", "running", "finished", "stopped" (by ``request_stop``) or "failed".
        failure: the error with which the run has failed, or None.
        own_keys: the entries of the state that each rank has for itself; the storage is that of rank 0 after a resume.
        rank_keys: the ``own_keys`` that a save gathers from all ranks; empty if not all ranks save.
        unsaved: names of attributes that checkpoints do not hold, such as ``("teacher",)``. They hold every other
            optimizer, schedule, gradient scaler and module that is a public attribute, or in a list, tuple or dict
            that is one.
    """

    own_keys: tuple[str, ...] = ("hooks", "rng")
    # a checkpoint leaves out what it cannot hold; the states in these entries one by one
    separate_states = ("hooks", "attributes", "_trainer", "_trainer.attributes")
    unsaved: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._hook_list = HookList(weakref.proxy(self))
        self._attributes = Attributes(weakref.proxy(self))
        self._early: EarlyEnd | None = None
        # from a checkpoint; restored after all iterators exist
        self._rng_state: dict[str, Any] | None = None
        self._ranks_agree = True
        self.rank_keys = self.own_keys
        self._at, self._stage = 0, 1  # see ``position``
        self.iter = self.start_iter = self.max_iter = 0
        self.storage = EventStorage()
        self.status: Literal["not started", "running", "finished", "stopped", "failed"] = (
            "not started"
        )
        self.failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({say_done(self.last_done_iter + 1, self.max_iter or None)}, {self.status})"

    def is_training(self) -> bool:
        return self.status == "running"

    def storage_in_use(self) -> EventStorage:
        """``storage``; in a loop of the user's own that has opened another one in its place, that one."""
        opened = storage_of_thread()
        if self.storage.is_open or opened is None:
            return self.storage
        return opened

    # ------------------------------------------------------------------ hooks

    def register_hooks(
        self,
        hooks: Iterable[HookBase | None],
        *,
        priority: int | str | None = None,
        before: Anchor | None = None,
        after: Anchor | None = None,
    ) -> None:
        """Add hooks after those with the same or a lower ``priority`` number; None entries are skipped.

        Args:
            priority: 0 (first) to 100 (last), or a name of `Priority`; default is each hook's own. With a number above
                `SAVE_POINT` hooks run below the save point.
            before, after: a registered hook, its class, or the name of its class: the new hooks are placed next to it.

        Raises:
            TypeError: an entry is not a `HookBase` object, or a method of it does not take the arguments of its point.
            ValueError: a hook is already registered; the priority is out of range; more than one of priority, before
                and after is given; the anchor is absent or matches several hooks.
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
        """The hooks of each point in their order: one line per point, and one for the save point."""
        self._hook_list.update()
        return self._hook_list.describe()

    def next_iter_of(self, hook: HookBase) -> int:
        """In ``before_train``: the next iteration in which this hook's ``after_step`` is called.

        It is ``start_iter``, or the one before for a hook below the save point, if its stage 2 is still to do.
        """
        return self._at if self._hook_list.is_below(hook) else self.start_iter

    # ------------------------------------------------------------------ points; a trainer class may override them

    before_epoch, after_epoch = _point("before_epoch"), _point("after_epoch")
    # a user's run_step calls it between the gradients and the update
    after_backward = _point("after_backward")
    before_eval, after_eval = _point("before_eval"), _point("after_eval")
    before_eval_step, after_eval_step = _point("before_eval_step"), _point("after_eval_step")
    after_load = _point("after_load")

    # ------------------------------------------------------------------ epochs

    @property
    def iters_per_epoch(self) -> int:
        """Iterations per pass over the training data, rounded.

        A subclass that knows its data overrides this. Raises ValueError if there are no epochs.
        """
        raise ValueError(
            f"{type(self).__name__} does not define iters_per_epoch, so it has no epochs; use iterations"
        )

    @property
    def epoch_length(self) -> int | Fraction:
        """Iterations per pass over the training data, not rounded; n epochs are ``round(n * epoch_length)`` iterations.

        Raises as `iters_per_epoch`.
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

    def _find_epoch_end(self, done: int) -> int:
        """The next number of iterations after which an epoch ends: -1 without epochs, 0 before the first one."""
        if not self.has_epochs:
            return -1
        length = self.epoch_length
        return round((periods_done(done, length) + 1) * length) if done >= 0 else 0

    # ------------------------------------------------------------------ of the trainer that makes the steps

    @property
    def _step(self) -> "RunState":
        """The trainer that makes the steps of this one."""
        return self

    def share_run(self, owner: "RunState") -> None:
        """Make the steps of ``owner``, whose hooks are called."""
        self._hook_list = owner._hook_list
        if type(owner).after_backward is not RunState.after_backward:
            outer = weakref.proxy(owner)
            self.after_backward = lambda: outer.after_backward()

    def acts_after_backward(self) -> bool:
        """Whether a hook or a subclass does anything in ``after_backward``."""
        own = getattr(self.after_backward, "__func__", None) is not RunState.after_backward
        return own or bool(self._hook_list.at["after_backward"])

    def start_run(self) -> None:
        """Forget the steps of an earlier run; called when a run starts."""

    def make_iterators(self) -> None:
        """Create the data iterators. Called before random state is restored, since a loader may draw random numbers."""

    def end_step(self) -> None:
        """Release what only stage 1 may read; called at the save point."""

    def find_failure(self, everywhere: bool = True) -> str | None:
        """What is not finite on this rank, or None. With ``everywhere`` every rank calls it, and they may exchange."""

    # ------------------------------------------------------------------ state

    @property
    def position(self) -> Position:
        """The position of the run, as in a checkpoint."""
        return Position(self._at, self._stage)

    @property
    def last_done_iter(self) -> int:
        """The last iteration whose update is done; -1 if there is none."""
        return self._at - (self._stage == 1)

    @property
    def next_iter(self) -> int:
        """The iteration with which ``train()`` goes on: 0 at first, then that after the last update that is done."""
        return self.last_done_iter + 1

    def gather(self, value: _T) -> list[_T]:
        """The ``value`` of every rank; only this rank's if ranks have different hooks, since not all may call it."""
        return comm.all_gather(value) if self._ranks_agree else [value]

    @property
    def ends_early(self) -> bool:
        """Whether this run has reached its goal before ``max_iter``, so that no iteration follows."""
        return self._early is not None

    def _stays_finished(self, max_iter: int) -> bool:
        """Whether a run that has finished early has nothing to do, though it has not reached ``max_iter``."""
        return (
            self._early is not None
            and max_iter <= self._early.max_iter
            and self._early.settings == self._hook_list.settings_of_early_end()
        )

    def describe_inexact(self) -> list[str]:
        """The reasons why a resumed run of this trainer may differ; empty if it continues bit for bit."""
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
        """name -> parameter, of all modules of this trainer, so that states of optimizers find their parameters."""
        modules = {}
        for name, value in stateful_attributes(self).items():
            if isinstance(value, nn.Module):
                modules[f"{name}."] = value
        return names_in(modules)

    def state_dict(self) -> dict[str, Any]:
        """The position, and the states of hooks (by unique names), attributes, storage and random generators.

        ``iteration`` is the last one whose update is done; ``stage`` is 2 if its stage 2 is not done.
        """
        early = self._early
        max_iter = self.max_iter if early is None else early.max_iter
        return {
            "iteration": self.last_done_iter,
            "position": {
                "stage": self._stage,
                "max_iter": max_iter,
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
        """Called before anything is loaded. Raises CheckpointError if a state does not fit; nothing is changed."""
        self._attributes.check(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state with the next ``train()``; files of detectron2 have only some of the entries."""
        self._hook_list.load_state_dict(state_dict.get("hooks", {}))
        self._attributes.load_state_dict(state_dict)
        if self.status == "running":  # a hook has restored the model; the run keeps its position
            return
        iteration, saved = (
            state_dict["iteration"],
            state_dict.get("position", {"stage": 1, "finished_early": None}),
        )
        check_period("iteration", iteration, minimum=-1)
        if saved["stage"] not in (1, 2):
            raise ValueError(f"the stage must be 1 or 2, got {saved['stage']!r}")
        self._at, self._stage = iteration + (saved["stage"] == 1), saved["stage"]
        self.iter, self.start_iter, self.status = iteration, iteration + 1, "not started"
        self._early = None
        check_period("max_iter", saved.get("max_iter", 0))
        if saved["finished_early"] is not None:
            settings = saved["settings_of_early_end"]
            self._early = EarlyEnd(saved["finished_early"], saved["max_iter"], settings)
        # max_iter from a config comes first
        self.max_iter = self.max_iter or saved.get("max_iter", 0)
        self.storage = EventStorage()
        with loading("the storage"):
            if state_dict.get("storage"):
                self.storage.load_state_dict(state_dict["storage"])
        saved, present = state_dict.get("world_size", 1), comm.get_data_world_size()
        check_period("world_size", saved, minimum=1)
        with loading("the random state"):
            if state_dict.get("rng") is not None:
                check_rng_state(state_dict["rng"])
            self._rng_state = rng_state_for_rank(state_dict.get("rng"), saved, present, iteration)
