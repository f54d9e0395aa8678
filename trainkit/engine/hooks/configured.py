"""The hooks listed in a config."""

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from trainkit.config import ConfigError
from trainkit.config.errors import look_up, unknown_name
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.engine.hook_list import sort_key
from trainkit.engine.hooks import checkpoint, early_stopping, evaluation, lr_scheduler, timer, writer  # noqa: F401 - these register themselves

logger = logging.getLogger(__name__)

_Entry: TypeAlias = Mapping[str, Any]
# required constructor arguments that come from the trainer if the config does not give them
_FROM_TRAINER = ("cfg", "model", "optimizer", "checkpointer", "data_loader")
_PLACES = ("PRIORITY", "BEFORE", "AFTER")


class ConfiguredHooks:
    """The entries of ``HOOKS``. Each becomes a hook when ``build_hooks`` reaches its place.

    An entry is ``{NAME: a name in HOOK_REGISTRY, ...}`` with the constructor's arguments in upper case. ``ENABLED:
    False`` switches off a default hook; one of ``PRIORITY``, ``BEFORE`` and ``AFTER`` moves a hook. Arguments that the
    entry does not give come from ``HookBase.config_arguments``; if they are required, ``cfg``, ``model``,
    ``optimizer``, ``checkpointer`` and ``data_loader`` come from the trainer.

    Raises:
        ConfigError: an entry is malformed or its name is unknown; later: its place or an argument is not accepted.
    """

    def __init__(self, entries: Iterable[Any], trainer: Any) -> None:
        self._entries: list[_Entry] = [*entries]
        self._trainer = trainer
        self._anchored: list[tuple[HookBase, dict[str, Any]]] = []
        for entry in self._entries:
            is_entry = isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry)
            if not is_entry or not isinstance(entry.get("NAME"), str):
                raise ConfigError(f"HOOKS is a list of entries such as {{NAME: EMAHook, DECAY: 0.999}}; got {entry!r}")
            look_up(HOOK_REGISTRY, entry["NAME"], "HOOKS")

    def take(
        self, hook_class: type[HookBase], *, default: bool = True, priority: int | None = None, **arguments: Any
    ) -> list[HookBase]:
        """The hooks of one class; ``arguments`` and ``priority`` count if the entries do not give them.

        Args:
            default: make one hook if no entry names the class.
        """
        name = hook_class.__name__
        mine = [entry for entry in self._entries if entry["NAME"] == name]
        # entries that disable the class stay, because it may be taken twice
        self._entries = [entry for entry in self._entries if entry["NAME"] != name or not entry.get("ENABLED", True)]
        return self._make(mine or [{"NAME": name}] * default, hook_class, arguments, priority)

    def rest(self, *, without_training: bool = False) -> list[HookBase]:
        """All hooks that have not been taken, in the order of their entries.

        Args:
            without_training: leave out hooks that need a part of the training, such as the optimizer; ignore places.
        """
        mine, self._entries = self._entries, [entry for entry in self._entries if not entry.get("ENABLED", True)]
        if not without_training:
            return self._make(mine)
        able = [entry for entry in mine if not self._absent(HOOK_REGISTRY.get(entry["NAME"]), entry)]
        if left_out := [entry["NAME"] for entry in mine if entry not in able]:
            logger.info("HOOKS: %s are left out, since they need a part of the training", ", ".join(left_out))
        return self._make({key: value for key, value in entry.items() if key not in _PLACES} for entry in able)

    def register_at_anchors(self) -> None:
        """Register the hooks whose entries have BEFORE or AFTER; call it after all others are registered.

        Raises:
            ConfigError: an anchor is absent, or matches several hooks.
        """
        for hook, place in self._anchored:
            try:
                self._trainer.register_hooks([hook], **place)
            except ValueError as error:
                raise ConfigError(f"HOOKS: {type(hook).__name__}: {error}") from error
        if names := [entry["NAME"] for entry in self._entries if entry.get("ENABLED", True)]:
            logger.warning("HOOKS: build_hooks() has not used %s; call super().build_hooks()", ", ".join(names))

    def _make(
        self, entries: Iterable[_Entry], hook_class: Any = None, arguments: _Entry | None = None, priority: Any = None
    ) -> list[HookBase]:
        hooks = []
        for entry in [entry for entry in entries if entry.get("ENABLED", True)]:
            place = {key.lower(): entry[key] for key in _PLACES if entry.get(key) is not None}
            try:
                hook = self._construct(hook_class or HOOK_REGISTRY.get(entry["NAME"]), entry, arguments or {})
                if place.keys() & {"before", "after"}:
                    self._anchored.append((hook, place))
                    continue
                hook.priority = place.get("priority", hook.priority if priority is None else priority)
                sort_key(hook.priority, -1, 101)  # raises its error now
            except (TypeError, ValueError) as error:
                raise ConfigError(f"HOOKS: {entry['NAME']}: {error}") from error
            hooks.append(hook)
        return hooks

    def _construct(self, hook_class: Any, entry: _Entry, arguments: _Entry) -> HookBase:
        accepted = inspect.signature(hook_class).parameters
        named = {key.lower(): value for key, value in entry.items() if key not in ("NAME", "ENABLED", *_PLACES)}
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        if not takes_any and (wrong := [name for name in named if name not in accepted]):
            raise unknown_name("arguments", wrong[0].upper(), "accepted", map(str.upper, accepted))
        of_keys: _Entry = getattr(hook_class, "config_arguments", lambda _: {})(self._trainer)
        given = {name: value for name, value in of_keys.items() if name in accepted} | {**arguments, **named}
        needed = [name for name in _FROM_TRAINER if name in _required(hook_class) and name not in given]
        hook: HookBase = hook_class(**given, **{name: getattr(self._trainer, name) for name in needed})
        return hook

    def _absent(self, hook_class: Any, entry: _Entry) -> list[str]:
        """The required arguments that neither the entry nor the trainer has."""
        here = [name for name in _FROM_TRAINER if hasattr(self._trainer, name)]
        return [name for name in _required(hook_class) if name not in here and name.upper() not in entry]


def _required(hook_class: Any) -> list[str]:
    """The names of the constructor's arguments without a default."""
    parameters = inspect.signature(hook_class).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [parameter.name for parameter in named if parameter.default is parameter.empty]
