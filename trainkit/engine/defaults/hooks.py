"""The hooks listed in a config."""

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.engine.hook_list import sort_key
from trainkit.utils.errors import look_up

logger = logging.getLogger(__name__)

# required constructor arguments that come from the trainer if the config does not give them
_FROM_TRAINER = ("cfg", "model", "optimizer", "checkpointer", "data_loader")


class ConfiguredHooks:
    """The entries of ``HOOKS``. Each becomes a hook when ``build_hooks`` reaches its place.

    An entry is ``{NAME: a name in HOOK_REGISTRY, ...}`` with the constructor's arguments in upper case. ``ENABLED:
    False`` switches off a default hook; ``PRIORITY`` moves a hook. Arguments that the entry does not give come from
    ``HookBase.config_arguments``; if they are required, ``cfg``, ``model``, ``optimizer``, ``checkpointer`` and
    ``data_loader`` come from the trainer. Wrong entries raise ConfigError.
    """

    def __init__(self, entries: Iterable[Any], trainer: Any) -> None:
        self._entries, self._trainer = [*entries], trainer
        for entry in self._entries:
            if not isinstance(entry, Mapping) or not isinstance(entry.get("NAME"), str):
                raise ConfigError(
                    f"HOOKS is a list of entries such as {{NAME: EMAHook, DECAY: 0.999}}; got {entry!r}"
                )
            look_up(HOOK_REGISTRY, entry["NAME"], "HOOKS")
        self._off = {entry["NAME"] for entry in self._entries if not entry.get("ENABLED", True)}
        self._taken: set[str] = set()

    def take(
        self,
        hook_class: type[HookBase],
        *,
        default: bool = True,
        priority: int | None = None,
        **arguments: Any,
    ) -> list[HookBase]:
        """The hooks of one class; ``arguments`` and ``priority`` count if the entries do not give them.

        With ``default`` it is one hook if no entry names the class, or its entries are taken already.
        """
        name = hook_class.__name__
        entries = (
            []
            if name in self._taken
            else [entry for entry in self._entries if entry["NAME"] == name]
        )
        self._taken.add(name)
        if name in self._off:
            return []
        return [
            self._make(hook_class, entry, priority, **arguments)
            for entry in entries or [{"NAME": name}] * default
        ]

    def rest(self, *, without_training: bool = False) -> list[HookBase]:
        """The hooks of all other entries, in their order; ``without_training``: if they need no optimizer or loader."""
        names, hooks = {entry["NAME"] for entry in self._entries} - self._taken - self._off, []
        self._taken |= names
        for entry in [entry for entry in self._entries if entry["NAME"] in names]:
            hook_class = HOOK_REGISTRY.get(entry["NAME"])
            if (
                without_training
                and _required(hook_class) - self._arguments(hook_class, entry).keys()
            ):
                logger.info(
                    "HOOKS: %s is left out, since it needs a part of the training", entry["NAME"]
                )
            else:
                hooks.append(self._make(hook_class, entry))
        return hooks

    def check_taken(self) -> None:
        """Warn about entries that ``build_hooks`` has not used."""
        if names := {entry["NAME"] for entry in self._entries} - self._taken - self._off:
            logger.warning(
                "HOOKS: build_hooks() has not used %s; call super().build_hooks()",
                ", ".join(sorted(names)),
            )

    def _make(
        self,
        hook_class: Any,
        entry: Mapping[str, Any],
        priority: int | None = None,
        **arguments: Any,
    ) -> HookBase:
        try:
            hook: HookBase = hook_class(**self._arguments(hook_class, entry, **arguments))
            hook.priority = entry.get("PRIORITY", hook.priority if priority is None else priority)
            sort_key(hook.priority, -1, 101)  # raises its error now
        except (TypeError, ValueError) as error:
            raise ConfigError(f"HOOKS: {entry['NAME']}: {error}") from error
        return hook

    def _arguments(
        self, hook_class: Any, entry: Mapping[str, Any], **arguments: Any
    ) -> dict[str, Any]:
        """By rising precedence: parts of the trainer, values of the config, ``arguments``, the entry."""
        needed = [
            name
            for name in _FROM_TRAINER
            if name in _required(hook_class) and hasattr(self._trainer, name)
        ]
        of_keys: Mapping[str, Any] = getattr(hook_class, "config_arguments", lambda _: {})(
            self._trainer
        )
        accepted = inspect.signature(hook_class).parameters
        of_entry = {
            key.lower(): value
            for key, value in entry.items()
            if key not in ("NAME", "ENABLED", "PRIORITY")
        }
        of_trainer = {name: getattr(self._trainer, name) for name in needed}
        return (
            of_trainer
            | {name: value for name, value in of_keys.items() if name in accepted}
            | arguments
            | of_entry
        )


def _required(hook_class: Any) -> set[str]:
    """The names of the constructor's arguments without a default."""
    parameters = inspect.signature(hook_class).parameters.values()
    return {
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
