"""The hooks listed in a config."""

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.engine.hook_list import own_sort_key
from trainkit.utils.errors import look_up

logger = logging.getLogger(__name__)

# required constructor arguments that come from the trainer if the config does not give them
_FROM_TRAINER = ("cfg", "model", "optimizer", "checkpointer", "data_loader")


class ConfiguredHooks:
    """The entries of ``HOOKS``. Each becomes a hook when ``build_hooks`` reaches its place.

    An entry is ``{NAME: a name in HOOK_REGISTRY, ...}`` with the constructor's arguments in upper
    case. ``ENABLED: False`` switches off a default hook; ``PRIORITY`` moves a hook. Arguments that
    the entry does not give come from ``HookBase.config_arguments``; if they are required, ``cfg``,
    ``model``, ``optimizer``, ``checkpointer`` and ``data_loader`` come from the trainer. Wrong
    entries raise ConfigError.
    """

    def __init__(self, entries: Iterable[Any], trainer: Any) -> None:
        self._entries = [*entries]
        self._trainer = trainer
        for entry in self._entries:
            if not isinstance(entry, Mapping) or not isinstance(entry.get("NAME"), str):
                raise ConfigError(
                    "HOOKS is a list of entries such as {NAME: EMAHook, DECAY: 0.999}; got "
                    f"{entry!r}"
                )
            look_up(HOOK_REGISTRY, entry["NAME"], "HOOKS")
        # names of hook classes: those that are switched off, and those that are made already
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
        """Make the hooks of one class.

        Args:
            default: there is one hook if no entry names the class, or its entries are taken
                already. False: then there is none.
            priority, arguments: count if an entry does not give them.
        """
        name = hook_class.__name__
        entries: list[Any] = []
        if name not in self._taken:
            entries = [entry for entry in self._entries if entry["NAME"] == name]
        if not entries and default:
            entries = [{"NAME": name}]
        self._taken.add(name)
        if name in self._off:
            return []
        return [self._make(hook_class, entry, priority, **arguments) for entry in entries]

    def rest(self, *, without_training: bool = False) -> list[HookBase]:
        """Make the hooks of all other entries, in their order.

        Args:
            without_training: leave out those that need an optimizer or a loader.
        """
        names = self._names_left()
        self._taken |= names
        hooks = []
        for entry in self._entries:
            if entry["NAME"] not in names:
                continue
            hook_class = HOOK_REGISTRY.get(entry["NAME"])
            if without_training:
                missing = _required(hook_class) - self._arguments(hook_class, entry).keys()
                if missing:
                    logger.info(
                        "HOOKS: %s is left out, since it needs a part of the training",
                        entry["NAME"],
                    )
                    continue
            hooks.append(self._make(hook_class, entry))
        return hooks

    def check_taken(self) -> None:
        """Warn about entries that ``build_hooks`` has not used."""
        names = self._names_left()
        if names:
            logger.warning(
                "HOOKS: build_hooks() has not used %s; call super().build_hooks()",
                ", ".join(sorted(names)),
            )

    def _names_left(self) -> set[str]:
        """The names of hooks that are neither made nor switched off."""
        return {entry["NAME"] for entry in self._entries} - self._taken - self._off

    def _make(
        self,
        hook_class: Any,
        entry: Mapping[str, Any],
        priority: int | None = None,
        **arguments: Any,
    ) -> HookBase:
        try:
            hook: HookBase = hook_class(**self._arguments(hook_class, entry, **arguments))
            if priority is not None:
                hook.priority = priority
            if "PRIORITY" in entry:
                hook.priority = entry["PRIORITY"]
            own_sort_key(hook)  # raises its error now
        except (TypeError, ValueError) as error:
            text = f"HOOKS: {entry['NAME']}: {error}"
            if "unexpected keyword argument" in str(error):
                accepted = [name.upper() for name in inspect.signature(hook_class).parameters]
                text += f"; accepted: {', '.join(accepted)}"
            raise ConfigError(text) from error
        return hook

    def _arguments(
        self, hook_class: Any, entry: Mapping[str, Any], **arguments: Any
    ) -> dict[str, Any]:
        """The arguments of the constructor.

        By rising precedence: parts of the trainer, values of the config, ``arguments``, the entry.
        """
        collected: dict[str, Any] = {}
        required = _required(hook_class)
        for name in _FROM_TRAINER:
            if name in required and hasattr(self._trainer, name):
                collected[name] = getattr(self._trainer, name)
        if hasattr(hook_class, "config_arguments"):  # a function in the registry has no such method
            accepted = inspect.signature(hook_class).parameters
            for name, value in hook_class.config_arguments(self._trainer).items():
                if name in accepted:
                    collected[name] = value
        collected.update(arguments)
        for key, value in entry.items():
            if key not in ("NAME", "ENABLED", "PRIORITY"):
                collected[key.lower()] = value
        return collected


def _required(hook_class: Any) -> set[str]:
    """The names of the constructor's arguments without a default."""
    required = set()
    for parameter in inspect.signature(hook_class).parameters.values():
        takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not takes_any:
            required.add(parameter.name)
    return required
