"""The loop and its hooks. It knows nothing of models, data or optimizers."""

import inspect
import logging
import weakref
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Literal, TypeAlias

from trainkit.utils.events import EventStorage

logger = logging.getLogger(__name__)


class Priority(IntEnum):
    """Names for the places of hooks: the lower, the earlier. Equal ones run in the order of their registration."""

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


HOOK_POINTS = ("before_train", "before_step", "after_backward", "after_step", "after_train")


class HookBase:
    """Something that happens at points of the loop; a subclass overrides the points it needs.

    ::

        hook.before_train()
        for iter in range(start_iter, max_iter):
            hook.before_step()
            trainer.run_step()        # calls hook.after_backward() between the gradients and the update
            hook.after_step()
        hook.after_train()

    ``self.trainer`` is set by ``register_hooks`` and is a weak reference: hook and trainer keep nobody else alive.
    ``before_step`` should cost next to nothing, since the time of a step begins behind it. A hook deletes nothing
    in ``after_train``, so that the same trainer can ``train()`` again.
    """

    trainer: Any = None  # a weakref.proxy of the TrainerBase; Any, since a hook may know the subclass it is for
    priority: int | str = Priority.NORMAL

    def before_train(self) -> None:
        """Before the first iteration."""

    def before_step(self) -> None:
        """Before each iteration."""

    def after_backward(self) -> None:
        """When all gradients of an iteration are there, unscaled and not yet clipped."""

    def after_step(self) -> None:
        """After each iteration; ``trainer.iter`` is the one just done."""

    def after_train(self) -> None:
        """After the last iteration or a failure; ``trainer.status`` says which. On "failed" wait for no other rank."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this hook: tensors and plain Python values only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave; a hook with state overrides both.

        Raises:
            NotImplementedError: there is a state, and the hook does not say how to load it.
        """
        if state_dict:
            raise NotImplementedError(
                f"{type(self).__name__} saves a state ({', '.join(state_dict)}) but has no load_state_dict; define both"
            )


Anchor: TypeAlias = type[HookBase] | HookBase | str
Status: TypeAlias = Literal["not started", "running", "finished", "stopped", "failed"]


class TrainerBase:
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
        self._hooks: list[HookBase] = []
        self._keys: dict[int, int] = {}  # id of a hook -> its sort key
        self._named_hooks: dict[str, HookBase] = {}
        self._calls: dict[str, list[HookBase]] = {point: [] for point in HOOK_POINTS}
        self._unclaimed_states: dict[str, dict[str, Any]] = {}
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
        self.status, self._stop = "running", None
        self._find_calls()  # once more: the list may have been rearranged by hand

        with EventStorage(start_iter) as self.storage:
            try:
                self.before_train()
                while self.iter < self.max_iter and self._stop is None:
                    self.before_step()
                    self.run_step()
                    self._last_done_iter = self.iter
                    self.after_step()
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
        traced = isinstance(error, Exception)  # not Ctrl-C
        logger.error("Training failed in iteration %d: %s: %s", self.iter, type(error).__name__, error, exc_info=traced)
        try:
            self.storage.flush()
        except Exception as later:
            if later is not error:
                logger.error("Storing or writing metrics failed as well: %s: %s", type(later).__name__, later)

    # ------------------------------------------------------------------ hook points

    def before_train(self) -> None:
        for hook in self._calls["before_train"]:
            hook.before_train()

    def before_step(self) -> None:
        self.storage.iter = self.iter  # what a hook or a model puts belongs to this iteration
        self.storage.raise_error()  # what a worker has found wrong in earlier ones
        for hook in self._calls["before_step"]:
            hook.before_step()

    def after_backward(self) -> None:
        """``run_step`` must call it between the gradients and the update."""
        for hook in self._calls["after_backward"]:
            hook.after_backward()

    def after_step(self) -> None:
        for hook in self._calls["after_step"]:
            hook.after_step()

    def after_train(self) -> None:
        """Every hook gets its ``after_train``, whatever happened; the first failure here is raised at the end."""
        self.storage.iter = self.iter
        first_error: BaseException | None = None
        calls = [(type(hook).__name__, hook.after_train) for hook in self._calls["after_train"]]
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

    # ------------------------------------------------------------------ registration

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
        if not isinstance(hooks, Iterable):
            raise TypeError(f"register_hooks takes a list of hooks, got {hooks!r}; put it into a list")
        new = [hook for hook in hooks if hook is not None]
        for i, hook in enumerate(new):
            self._check_hook(hook, self._hooks + new[:i])
        if sum(argument is not None for argument in (priority, before, after)) > 1:
            raise ValueError("give one of priority, before and after: an anchor has a priority of its own")
        # the places before HIGHEST and behind LOWEST are kept for the timer and the writers
        keys = [_sort_key(hook.priority, -1, 101) if priority is None else _sort_key(priority, 0, 100) for hook in new]

        if before is not None or after is not None:
            anchor = self._find_anchor(before if before is not None else after)
            position = self._hooks.index(anchor) + (after is not None)
            self._hooks[position:position] = new
            keys = [self._key(anchor)] * len(new)
        else:
            for hook, key in zip(new, keys, strict=True):
                followers = (i for i, other in enumerate(self._hooks) if self._key(other) > key)
                self._hooks.insert(next(followers, len(self._hooks)), hook)
                self._keys[id(hook)] = key
        self._keys.update((id(hook), key) for hook, key in zip(new, keys, strict=True))
        for hook in new:
            hook.trainer = weakref.proxy(self)
            self._name(hook)
        self._find_calls()
        self._hand_out_states()

    def describe_hooks(self) -> str:
        """Who runs at which hook point, in which order: one line per point."""
        width = max(map(len, HOOK_POINTS))
        return "\n".join(
            f"  {point:<{width}}  {', '.join(type(h).__name__ for h in self._hooks if _overrides(h, point)) or '-'}"
            for point in HOOK_POINTS
        )

    @staticmethod
    def _check_hook(hook: object, registered: list[HookBase]) -> None:
        if inspect.isclass(hook) and issubclass(hook, HookBase):
            raise TypeError(
                f"register_hooks takes hook objects, got the class {hook.__name__}; write {hook.__name__}()"
            )
        if not isinstance(hook, HookBase):
            raise TypeError(
                f"a hook is an object of a subclass of trainkit.engine.HookBase, got {type(hook).__name__} ({hook!r}); "
                "for a bare function use hooks.CallbackHook(after_step=function)"
            )
        if any(hook is other for other in registered):
            raise ValueError(f"this {type(hook).__name__} is registered already; make a second object of the class")

    def _key(self, hook: HookBase) -> int:
        key = self._keys.get(id(hook))
        return _sort_key(hook.priority, -1, 101) if key is None else key  # some put hooks into the list by hand

    def _find_anchor(self, anchor: Anchor | None) -> HookBase:
        def fits(hook: HookBase) -> bool:
            if isinstance(anchor, str):
                return type(hook).__name__ == anchor
            return isinstance(hook, anchor) if isinstance(anchor, type) else hook is anchor

        found = [hook for hook in self._hooks if fits(hook)]
        if len(found) != 1:
            names = ", ".join(type(hook).__name__ for hook in self._hooks) or "none"
            problem = "no registered hook" if not found else f"{len(found)} registered hooks"
            raise ValueError(f"the anchor {anchor!r} stands for {problem}; it must stand for one of: {names}")
        return found[0]

    def _find_calls(self) -> None:
        """A hook that does not override a point is not called there."""
        self._calls = {point: [hook for hook in self._hooks if _overrides(hook, point)] for point in HOOK_POINTS}

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """``iteration`` (the last one done) and the state of every hook that has one, under a unique name each."""
        states = {name: hook.state_dict() for name, hook in self._named_hooks.items()}
        return {"iteration": self._last_done_iter, "hooks": {name: state for name, state in states.items() if state}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the iteration and give each registered hook its state; the rest waits for hooks that come later."""
        self.iter = self._last_done_iter = state_dict["iteration"]
        self._unclaimed_states = dict(state_dict.get("hooks", {}))
        self._hand_out_states()

    def warn_unclaimed_states(self) -> None:
        """Name the saved states whose hooks are not registered: what they remembered is lost."""
        if self._unclaimed_states:
            logger.warning("The checkpoint has states of hooks that are not registered: %s", [*self._unclaimed_states])

    def _hand_out_states(self) -> None:
        for name in [name for name in self._unclaimed_states if name in self._named_hooks]:
            self._named_hooks[name].load_state_dict(self._unclaimed_states.pop(name))

    def _name(self, hook: HookBase) -> None:
        """The class name; ``Name#2``, ``Name#3`` in the order of registration where a class has several hooks."""
        base = type(hook).__qualname__
        count = 1 + sum(type(other).__qualname__ == base for other in self._named_hooks.values())
        self._named_hooks[base if count == 1 else f"{base}#{count}"] = hook


def _overrides(hook: HookBase, point: str) -> bool:
    return getattr(getattr(hook, point), "__func__", None) is not getattr(HookBase, point)


def _sort_key(priority: int | str, first: int, last: int) -> int:
    if isinstance(priority, str) and priority in Priority.__members__:
        return Priority[priority]
    if not isinstance(priority, int) or not first <= priority <= last:
        raise ValueError(
            f"priority must be from 0 (runs first) to 100 (runs last) or one of {', '.join(Priority.__members__)}; "
            f"got {priority!r}"
        )
    return priority


def is_due(trainer: TrainerBase, period: int, *, or_last: bool = False) -> bool:
    """Whether something with this period happens after the current iteration; the one rule of all hooks.

    True after the iterations ``period - 1, 2 * period - 1, ...``, with ``or_last`` also after the last one. A period
    of 0 is never due by itself.
    """
    done = trainer.iter + 1
    return (period > 0 and done % period == 0) or (or_last and done >= trainer.max_iter)


def check_period(name: str, period: int, *, minimum: int = 0) -> int:
    """
    Raises:
        ValueError: the argument called ``name`` is no whole number of iterations, or below ``minimum``.
    """
    if isinstance(period, bool) or not isinstance(period, int) or period < minimum:
        raise ValueError(f"{name} must be a whole number of iterations >= {minimum}, got {period!r}")
    return period
