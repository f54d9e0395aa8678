"""The hooks of a trainer: their order, names and states."""

import itertools
import logging
import textwrap
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

from trainkit.checkpoint.atomic import loading
from trainkit.engine.hook_base import EPOCH_POINTS, HOOK_POINTS, SAVE_POINT, HookBase, Priority
from trainkit.utils import comm
from trainkit.utils.errors import ConfigError
from trainkit.utils.periods import is_whole

logger = logging.getLogger(__name__)

Anchor: TypeAlias = type[HookBase] | HookBase | str


class HookList:
    """Hooks in their order. Each hook has one sort key, computed from its priority or anchor.

    Args:
        trainer: a weak reference, given to each hook.

    Attributes:
        hooks: the list itself; call ``update`` after changing it.
        at: point -> the hooks that override it, in the order in which they are called. At ``after_step`` these are the
            hooks above the save point. At ``after_train`` hooks that save or evaluate the run (``ends``) come first,
            since others may need the results; writers come last.
        boundary, epoch_end: the ``after_step`` of the hooks below the save point, and the ``after_epoch`` of all, each
            with the name by which a state says that it has returned.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.hooks: list[HookBase] = []
        self._keys: dict[int, int] = {}  # id of a hook -> its sort key
        self._names: dict[str, HookBase] = {}
        self._unclaimed_states: dict[str, dict[str, Any]] = {}
        self.update()

    def update(self) -> None:
        """Compute the hooks of each point and the names again, after a change of ``hooks``."""
        self.at = {
            point: [hook for hook in self.hooks if overrides(hook, point)] for point in HOOK_POINTS
        }
        stepping = self.at["after_step"]
        self._below = [hook for hook in stepping if self.is_below(hook)]
        self.at["after_step"] = [hook for hook in stepping if not self.is_below(hook)]
        self.at["after_train"].sort(key=self._place_at_end)
        self._find_names()
        self.boundary = [(self.name_of_call(hook), hook.after_step) for hook in self._below]
        self.epoch_end = [
            (self.name_of_call(hook, "after_epoch"), hook.after_epoch)
            for hook in self.at["after_epoch"]
        ]

    def _place_at_end(self, hook: HookBase) -> int:
        if self._key(hook) > Priority.LOWEST:
            return 2
        return 0 if hook.ends else 1

    def _find_names(self) -> None:
        self._names = {
            name: hook
            for name, hook in self._names.items()
            if any(hook is other for other in self.hooks)
        }
        for hook in self.hooks:
            if all(hook is not named for named in self._names.values()):
                base = type(hook).__qualname__.rpartition("<locals>.")[2]
                # further hooks of a class get Name#2, Name#3 in the order of registration
                names = itertools.chain([base], (f"{base}#{count}" for count in itertools.count(2)))
                self._names[next(name for name in names if name not in self._names)] = hook

    def name_of_call(self, hook: HookBase, point: str = "after_step") -> str:
        """The name of a call of a registered hook in a state, such as ``EvalHook.after_step``."""
        return next(
            f"{name}.{point}" for name, registered in self._names.items() if registered is hook
        )

    def is_below(self, hook: HookBase) -> bool:
        return self._key(hook) > SAVE_POINT

    def check(self, *, has_epochs: bool) -> bool:
        """Check the hooks before a run starts, and log their order; every rank calls it.

        Returns:
            Whether all ranks have the same hooks. If not, an exchange by one hook could wait for ever.

        Raises:
            ConfigError: a hook uses epoch points, but there are no epochs.
        """
        self.update()  # the user may have changed the list
        asking = [type(hook).__name__ for point in EPOCH_POINTS for hook in self.at[point]]
        if asking and not has_epochs:
            raise ConfigError(
                f"{asking[0]} uses epochs, but the training data has no length; use iterations"
            )
        description, indent = self.describe(), " " * (max(map(len, HOOK_POINTS)) + 4)
        fill = partial(textwrap.fill, width=80, subsequent_indent=indent)
        logger.info("Hooks in order:\n%s", "\n".join(map(fill, description.splitlines())))
        first, *others = comm.all_gather(description)
        for rank, hooks in enumerate(others, 1):
            if hooks != first:
                text = "Rank %d has other hooks than rank 0; register them on all ranks:\n%s\n%s"
                logger.warning(text, rank, hooks, first)
        if self._unclaimed_states:
            logger.warning(
                "The checkpoint has states of hooks that are not registered: %s",
                [*self._unclaimed_states],
            )
        return all(hooks == first for hooks in others)

    def describe(self) -> str:
        """One line per point that a hook overrides, with the names under which the hooks are saved."""
        names = {id(hook): name for name, hook in self._names.items()}
        width = max(map(len, HOOK_POINTS))
        lines = []
        for point, hooks in self.at.items():
            stages = [hooks, self._below] if point == "after_step" else [hooks]
            named = [", ".join(names[id(hook)] for hook in stage) for stage in stages if stage]
            found = [f"  {point:<{width}}  {text}" for text in named]
            if point == "after_step":
                found.insert(
                    bool(hooks),
                    "  -- save point --  checkpoints are written; batch and losses are released",
                )
            lines += found
        return "\n".join(lines)

    # ------------------------------------------------------------------ registration

    def add(
        self,
        hooks: Iterable[HookBase | None],
        priority: int | str | None,
        before: Anchor | None,
        after: Anchor | None,
    ) -> None:
        """Insert hooks and load the states that wait for them; see `TrainerBase.register_hooks`."""
        if not isinstance(hooks, Iterable):
            raise TypeError(
                f"register_hooks takes a list of hooks, got {hooks!r}; write [hook] for a single one"
            )
        new: list[Any] = [hook for hook in hooks if hook is not None]
        for i, hook in enumerate(new):
            if not isinstance(hook, HookBase):
                text = f"got {hook!r}; write Hook() for a class, CallbackHook(after_step=function) for a function"
                raise TypeError(f"register_hooks takes objects of subclasses of HookBase, {text}")
            if any(hook is other for other in self.hooks + new[:i]):
                raise ValueError(f"this {type(hook).__name__} is registered already")
        if sum(argument is not None for argument in (priority, before, after)) > 1:
            raise ValueError(
                "register_hooks() takes one of priority, before and after: an anchor has a priority"
            )
        # only hooks themselves may choose -1 (timer) and 101 (writers)
        keys = [
            sort_key(hook.priority, -1, 101) if priority is None else sort_key(priority)
            for hook in new
        ]
        if before is not None or after is not None:
            anchor = self._find(before if before is not None else after)
            # a hook may have an __eq__
            position = [*map(id, self.hooks)].index(id(anchor)) + (after is not None)
            self.hooks[position:position] = new
            # a hook placed after the checkpointer is below the save point
            keys = [
                self._key(anchor) + (after is not None and self._key(anchor) == SAVE_POINT)
            ] * len(new)
        for hook, key in zip(new, keys, strict=True):
            if before is None and after is None:
                followers = (i for i, other in enumerate(self.hooks) if self._key(other) > key)
                self.hooks.insert(next(followers, len(self.hooks)), hook)
            self._keys[id(hook)] = key
            hook.trainer = self._trainer
        self.update()
        self._hand_out_states()

    def _key(self, hook: HookBase) -> int:
        key = self._keys.get(id(hook))
        # None: a user put it into the list
        return sort_key(hook.priority, -1, 101) if key is None else key

    def _find(self, anchor: Anchor | None) -> HookBase:
        # objects of subclasses match only if there is none of the class itself
        if isinstance(anchor, type):
            found = [hook for hook in self.hooks if type(hook) is anchor]
            found = found or [hook for hook in self.hooks if isinstance(hook, anchor)]
        else:
            found = [hook for hook in self.hooks if hook is anchor or type(hook).__name__ == anchor]
        if len(found) != 1:
            names = ", ".join(type(hook).__name__ for hook in self.hooks) or "none"
            raise ValueError(
                f"the anchor {anchor!r} matches {len(found)} hooks; it must match one of: {names}"
            )
        return found[0]

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """name -> state, of the hooks that have a state."""
        states = {name: hook.state_dict() for name, hook in self._names.items()}
        return {name: state for name, state in states.items() if state}

    def settings_of_early_end(self) -> dict[str, Any]:
        """name -> settings, of the hooks that may finish a run early."""
        settings = {name: hook.settings_of_early_end() for name, hook in self._names.items()}
        return {name: own for name, own in settings.items() if own}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give each hook its state; other states wait for hooks that are registered later."""
        if not isinstance(states, Mapping):
            raise TypeError(f"hooks must be a dict of states, got {states!r:.80}")
        self._unclaimed_states = dict(states)
        self._hand_out_states()

    def _hand_out_states(self) -> None:
        for name in [name for name in self._unclaimed_states if name in self._names]:
            with loading(f"the state of the hook {name!r}"):
                self._names[name].load_state_dict(self._unclaimed_states.pop(name))


def overrides(hook: HookBase | type[HookBase], point: str) -> bool:
    method = getattr(hook, point)
    return getattr(method, "__func__", method) is not getattr(HookBase, point)


def sort_key(priority: int | str, first: int = 0, last: int = 100) -> int:
    """The number of a priority. Raises ValueError if it is not a name of `Priority`, or out of range."""
    if isinstance(priority, str) and priority in Priority.__members__:
        return Priority[priority]
    if not is_whole(priority, first) or priority > last:
        names = ", ".join(Priority.__members__)
        raise ValueError(
            f"priority must be from 0 (runs first) to 100 (runs last) or one of {names}; got {priority!r}"
        )
    return priority
