"""The hooks of a trainer: their order, names and states."""

import logging
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from trainkit.checkpoint.errors import loading
from trainkit.engine.hook_base import EPOCH_POINTS, HOOK_POINTS, SAVE_POINT, HookBase, Priority
from trainkit.utils import comm
from trainkit.utils.errors import ConfigError
from trainkit.utils.periods import is_whole

logger = logging.getLogger(__name__)

Anchor: TypeAlias = type[HookBase] | HookBase | str


class HookList:
    """Hooks in their order, with their names and states.

    Each hook has one sort key: the number of its priority, or that of the hook next to which it was
    placed. The keys decide the order, and all lists of hooks are computed from it.

    Args:
        trainer: a weak reference, given to each hook.

    Attributes:
        hooks: the list itself; call ``update`` after changing it.
        at: point -> the hooks that override it, in the order in which they are called. At
            ``after_step`` these are the hooks above the save point. At ``after_train`` hooks that
            save or evaluate the run (``ends``) come first, since others may need the results;
            writers come last.
        boundary, epoch_end: the ``after_step`` of the hooks below the save point, and the
            ``after_epoch`` of all, each with the name by which a state says that it has returned.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.hooks: list[HookBase] = []
        self._keys: dict[int, int] = {}  # id of a registered hook -> its sort key
        self._names: dict[str, HookBase] = {}
        self._unclaimed_states: dict[str, dict[str, Any]] = {}
        self._logged = ""
        self.update()

    # ------------------------------------------------------------------ order

    def add(
        self,
        hooks: Iterable[HookBase | None],
        priority: int | str | None,
        before: Anchor | None,
        after: Anchor | None,
    ) -> None:
        """Insert hooks and load the states that wait for them; see `TrainerBase.register_hooks`."""
        new = self._checked(hooks)
        num_places = sum(argument is not None for argument in (priority, before, after))
        if num_places > 1:
            raise ValueError(
                "register_hooks() takes one of priority, before and after: an anchor has a priority"
            )
        if before is not None:
            anchor = self._find(before)
            self._insert(new, self._position_of(anchor), self._key(anchor))
        elif after is not None:
            anchor = self._find(after)
            key = self._key(anchor)
            if key == SAVE_POINT:
                key += 1  # what comes after the checkpointer is below the save point
            self._insert(new, self._position_of(anchor) + 1, key)
        else:
            keys = [own_sort_key(hook) if priority is None else sort_key(priority) for hook in new]
            for hook, key in zip(new, keys, strict=True):
                self._insert([hook], self._position_for(key), key)
        self.update()
        self._hand_out_states()

    def _checked(self, hooks: Iterable[HookBase | None]) -> list[HookBase]:
        """The hooks without None. Raises an error if one is no hook, or is registered already."""
        if not isinstance(hooks, Iterable):
            raise TypeError(
                f"register_hooks takes a list of hooks, got {hooks!r}; write [hook] for a single "
                "one"
            )
        new: list[HookBase] = []
        for hook in hooks:
            if hook is None:
                continue
            if not isinstance(hook, HookBase):
                raise TypeError(
                    "register_hooks takes objects of subclasses of HookBase, got "
                    f"{hook!r}; write Hook() for a class, CallbackHook(after_step=function) for a "
                    "function"
                )
            if _has(self.hooks, hook) or _has(new, hook):
                raise ValueError(f"this {type(hook).__name__} is registered already")
            new.append(hook)
        return new

    def _insert(self, hooks: list[HookBase], position: int, key: int) -> None:
        self.hooks[position:position] = hooks
        for hook in hooks:
            self._keys[id(hook)] = key
            hook.trainer = self._trainer

    def _position_for(self, key: int) -> int:
        """Before the first hook with a larger key."""
        for position, hook in enumerate(self.hooks):
            if self._key(hook) > key:
                return position
        return len(self.hooks)

    def _position_of(self, hook: HookBase) -> int:
        ids = [id(other) for other in self.hooks]  # a hook may have an __eq__
        return ids.index(id(hook))

    def _key(self, hook: HookBase) -> int:
        key = self._keys.get(id(hook))
        if key is None:  # a user has put the hook into the list
            return own_sort_key(hook)
        return key

    def _find(self, anchor: Anchor) -> HookBase:
        """The hook that an anchor names."""
        if isinstance(anchor, type):
            found = [hook for hook in self.hooks if type(hook) is anchor]
            if not found:
                found = [hook for hook in self.hooks if isinstance(hook, anchor)]
        elif isinstance(anchor, str):
            found = [hook for hook in self.hooks if type(hook).__name__ == anchor]
        else:
            found = [hook for hook in self.hooks if hook is anchor]
        if len(found) != 1:
            names = ", ".join(type(hook).__name__ for hook in self.hooks) or "none"
            raise ValueError(
                f"the anchor {anchor!r} matches {len(found)} hooks; it must match one of: {names}"
            )
        return found[0]

    def is_below(self, hook: HookBase) -> bool:
        """Whether the hook is below the save point."""
        return self._key(hook) > SAVE_POINT

    # ------------------------------------------------------------------ lists and names

    def update(self) -> None:
        """Compute the names and the hooks of each point again, after a change of ``hooks``."""
        self._update_names()
        self.at: dict[str, list[HookBase]] = {}
        for point in HOOK_POINTS:
            self.at[point] = [hook for hook in self.hooks if overrides(hook, point)]
        after_step = self.at["after_step"]
        self.at["after_step"] = [hook for hook in after_step if not self.is_below(hook)]
        self._below = [hook for hook in after_step if self.is_below(hook)]
        self.at["after_train"].sort(key=self._place_at_end)

        self.boundary = []
        for hook in self._below:
            self.boundary.append((self.name_of_call(hook), hook.after_step))
        self.epoch_end = []
        for hook in self.at["after_epoch"]:
            self.epoch_end.append((self.name_of_call(hook, "after_epoch"), hook.after_epoch))

    def _place_at_end(self, hook: HookBase) -> int:
        if self._key(hook) > Priority.LOWEST:
            return 2  # a writer
        return 0 if hook.ends else 1

    def _update_names(self) -> None:
        """Forget the names of hooks that are gone, and name those that are new."""
        former = self._names
        self._names = {}
        for name, hook in former.items():
            if _has(self.hooks, hook):
                self._names[name] = hook
        for hook in self.hooks:
            if not _has(self._names.values(), hook):
                self._names[self._new_name(hook)] = hook

    def _new_name(self, hook: HookBase) -> str:
        """The name of the class; for further hooks of a class Name#2, Name#3, ..."""
        base = type(hook).__qualname__.rpartition("<locals>.")[2]
        name = base
        number = 1
        while name in self._names:
            number += 1
            name = f"{base}#{number}"
        return name

    def _name_of(self, hook: HookBase) -> str:
        for name, registered in self._names.items():
            if registered is hook:
                return name
        raise ValueError(f"this {type(hook).__name__} is not registered")

    def name_of_call(self, hook: HookBase, point: str = "after_step") -> str:
        """The name of a call of a registered hook in a state, such as ``EvalHook.after_step``."""
        return f"{self._name_of(hook)}.{point}"

    # ------------------------------------------------------------------ check

    def check(self, *, has_epochs: bool) -> bool:
        """Check the hooks before a run, and log their order if it is new; every rank calls it.

        Returns:
            Whether all ranks have the same hooks. If not, an exchange by one hook could wait for
            ever.

        Raises:
            ConfigError: a hook uses epoch points, but there are no epochs.
        """
        self.update()  # the user may have changed the list
        if not has_epochs:
            self._refuse_epoch_points()
        description = self.describe()
        if description != self._logged:  # a notebook calls train() many times
            logger.info("Hooks in order:\n%s", _folded(description))
            self._logged = description
        by_rank = comm.all_gather(description)
        are_same = True
        for rank, of_rank in enumerate(by_rank):
            if of_rank != by_rank[0]:
                are_same = False
                logger.warning(
                    "Rank %d has other hooks than rank 0; register them on all ranks, or a resume "
                    "does not end with the same bits:\n%s\n%s",
                    rank,
                    of_rank,
                    by_rank[0],
                )
        if self._unclaimed_states:
            logger.warning(
                "The checkpoint has states of hooks that are not registered: %s",
                list(self._unclaimed_states),
            )
        return are_same

    def _refuse_epoch_points(self) -> None:
        for point in EPOCH_POINTS:
            for hook in self.at[point]:
                raise ConfigError(
                    f"{type(hook).__name__} uses epochs, but the training data has no length; use "
                    "iterations"
                )

    def describe(self) -> str:
        """One line per point that a hook overrides, with the names of the hooks in a checkpoint."""
        lines: list[str] = []
        for point in HOOK_POINTS:
            lines += self._described(point, self.at[point])
            if point == "after_step":
                lines.append(
                    "  -- save point --  checkpoints are written; batch and losses are released"
                )
                lines += self._described(point, self._below)
        return "\n".join(lines)

    def _described(self, point: str, hooks: list[HookBase]) -> list[str]:
        """The line of a point; none if there are no hooks."""
        if not hooks:
            return []
        names = [self._name_of(hook) for hook in hooks]
        return [f"  {point:<{_point_width()}}  {', '.join(names)}"]

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """name -> state, of the hooks that have a state."""
        states = {}
        for name, hook in self._names.items():
            state = hook.state_dict()
            if state:
                states[name] = state
        return states

    def settings_of_early_end(self) -> dict[str, Any]:
        """name -> settings, of the hooks that may finish a run early."""
        all_settings = {}
        for name, hook in self._names.items():
            settings = hook.settings_of_early_end()
            if settings:
                all_settings[name] = settings
        return all_settings

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give each hook its state; other states wait for hooks that are registered later."""
        if not isinstance(states, Mapping):
            raise TypeError(f"hooks must be a dict of states, got {states!r:.80}")
        self._unclaimed_states = dict(states)
        self._hand_out_states()

    def _hand_out_states(self) -> None:
        for name in list(self._unclaimed_states):
            if name in self._names:
                state = self._unclaimed_states.pop(name)
                with loading(f"the state of the hook {name!r}"):
                    self._names[name].load_state_dict(state)


def _has(hooks: Iterable[HookBase], hook: HookBase) -> bool:
    """Whether this object is among the hooks; a hook may have an ``__eq__``."""
    return any(hook is other for other in hooks)


def _point_width() -> int:
    return max(len(point) for point in HOOK_POINTS)


def _folded(description: str) -> str:
    """The description in lines of 80 columns."""
    indent = " " * (_point_width() + 4)
    lines = description.splitlines()
    return "\n".join(textwrap.fill(line, width=80, subsequent_indent=indent) for line in lines)


def overrides(hook: HookBase | type[HookBase], point: str) -> bool:
    """Whether a hook, or a class of hooks, has its own method for a point."""
    method = getattr(hook, point)
    function = getattr(method, "__func__", method)
    return function is not getattr(HookBase, point)


def own_sort_key(hook: HookBase) -> int:
    """The number of a hook's own priority.

    It may also be -1 (the timer) or 101 (writers), which `register_hooks` does not take.
    """
    return sort_key(hook.priority, -1, 101)


def sort_key(priority: int | str, first: int = 0, last: int = 100) -> int:
    """The number of a priority.

    Raises:
        ValueError: it is not a name of `Priority`, or out of range.
    """
    if isinstance(priority, str) and priority in Priority.__members__:
        return Priority[priority]
    if not is_whole(priority, first) or priority > last:
        names = ", ".join(Priority.__members__)
        raise ValueError(
            f"priority must be from 0 (runs first) to 100 (runs last) or one of {names}; got "
            f"{priority!r}"
        )
    return priority
