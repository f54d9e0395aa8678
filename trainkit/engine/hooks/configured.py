"""The hooks listed in a config."""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from trainkit.config import ConfigError
from trainkit.config.errors import look_up, unknown_name
from trainkit.engine.hook_base import EVALUATION_POINTS, HOOK_REGISTRY, HookBase
from trainkit.engine.hook_list import overrides, sort_key
from trainkit.engine.hooks import checkpoint, early_stopping, evaluation, lr_scheduler, timer, writer  # noqa: F401 - these register themselves
from trainkit.engine.loop import TrainerBase

logger = logging.getLogger(__name__)

# required constructor arguments that come from the trainer if the config does not give them
_FROM_TRAINER = ("cfg", "model", "optimizer", "checkpointer", "data_loader")
_PLACES = ("PRIORITY", "BEFORE", "AFTER")


class _Entry(NamedTuple):
    name: str
    enabled: bool = True
    place: Mapping[str, Any] = {}  # at most one of priority, before, after
    arguments: Mapping[str, Any] = {}


class ConfiguredHooks:
    """The entries of ``HOOKS``. Each becomes a hook when ``build_hooks`` reaches its place.

    An entry is ``{NAME: a name in HOOK_REGISTRY, ...}`` with the constructor's arguments in upper case. ``ENABLED:
    False`` switches off a default hook; one of ``PRIORITY``, ``BEFORE`` and ``AFTER`` moves a hook. Arguments that the
    entry does not give come from ``HookBase.config_arguments``; if they are required, ``cfg``, ``model``,
    ``optimizer``, ``checkpointer`` and ``data_loader`` come from the trainer.

    Raises:
        ConfigError: an entry is malformed; its name is unknown; an argument is unknown, missing or refused. Some of
            these errors are raised only when the hook is made.
    """

    def __init__(self, entries: Iterable[Any], trainer: Any) -> None:
        self._entries = [_parse(entry) for entry in entries]
        self._trainer = trainer
        self._anchored: list[tuple[HookBase, Mapping[str, Any]]] = []

    def take(
        self, hook_class: type[HookBase], *, default: bool = True, priority: int | None = None, **arguments: Any
    ) -> list[HookBase]:
        """The hooks of one class; ``arguments`` and ``priority`` count if the entries do not give them.

        Args:
            default: make one hook if no entry names the class.
        """
        name = hook_class.__name__
        mine = [entry for entry in self._entries if entry.name == name]
        # entries that disable the class stay, because it may be taken twice
        self._entries = [entry for entry in self._entries if entry.name != name or not entry.enabled]
        if not mine and default:
            mine = [_Entry(name)]
        return [hook for entry in mine for hook in self._make(entry, hook_class, arguments, priority)]

    def rest(self) -> list[HookBase]:
        """All hooks that have not been taken, in the order of their entries."""
        mine, self._entries = self._entries, [entry for entry in self._entries if not entry.enabled]
        return [hook for entry in mine for hook in self._make(entry, HOOK_REGISTRY.get(entry.name))]

    def for_evaluation(self) -> list[HookBase]:
        """The hooks that are used by an evaluation without training, in the order of the entries.

        A hook that needs a part of training, such as the optimizer, is left out.
        """
        hooks: list[HookBase] = []
        for entry in [entry for entry in self._entries if entry.enabled]:
            hook_class = HOOK_REGISTRY.get(entry.name)
            acts = isinstance(hook_class, type) and _acts_on_evaluation(hook_class)
            absent = set(_required(hook_class)) - set(entry.arguments)
            of_training = [name for name in absent.intersection(_FROM_TRAINER) if not hasattr(self._trainer, name)]
            if of_training and acts:
                logger.warning("HOOKS: %s is left out: without training there is no %s", entry.name, of_training[0])
            elif not of_training and (acts or absent.issubset(_FROM_TRAINER)):
                # make the hook first: some set their points on the object
                hooks += filter(_acts_on_evaluation, self._make(entry._replace(place={}), hook_class))
        return hooks

    def register_at_anchors(self, trainer: TrainerBase) -> None:
        """Register the hooks whose entries have BEFORE or AFTER; call it after all others are registered.

        Raises:
            ConfigError: an anchor is absent, or matches several hooks.
        """
        for hook, place in self._anchored:
            try:
                trainer.register_hooks([hook], **place)
            except ValueError as error:
                raise ConfigError(f"HOOKS: {type(hook).__name__}: {error}") from error
        if names := ", ".join(entry.name for entry in self._entries if entry.enabled):
            logger.warning("HOOKS of the config that build_hooks() has not used: %s; call super().build_hooks()", names)

    def _make(
        self,
        entry: _Entry,
        hook_class: Callable[..., HookBase],
        arguments: Mapping[str, Any] | None = None,
        priority: int | None = None,
    ) -> list[HookBase]:
        """The hook in a list, which is empty if the hook is switched off, or registered later at its anchor."""
        if not entry.enabled:
            return []
        hook = self._construct(entry, hook_class, arguments or {})
        hook.priority = entry.place.get("priority", hook.priority if priority is None else priority)
        if not entry.place.keys() & {"before", "after"}:
            return [hook]
        self._anchored.append((hook, entry.place))
        return []

    def _construct(self, entry: _Entry, hook_class: Callable[..., HookBase], arguments: Mapping[str, Any]) -> HookBase:
        accepted = inspect.signature(hook_class).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        for name in entry.arguments:
            if name not in accepted and not takes_any:
                raise unknown_name(f"HOOKS: {entry.name}", name.upper(), "it takes", map(str.upper, accepted))
        from_keys = getattr(hook_class, "config_arguments", lambda _: {})(self._trainer)
        given = {name: value for name, value in from_keys.items() if name in accepted}
        given |= {**arguments, **entry.arguments}
        for name in _required(hook_class):
            if name not in given and name in _FROM_TRAINER:
                given[name] = getattr(self._trainer, name)
        try:
            return hook_class(**given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"HOOKS: {entry.name}: {error}") from error


def _parse(entry: Any) -> _Entry:
    is_entry = isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry)
    if not is_entry or not isinstance(entry.get("NAME"), str):
        raise ConfigError(f"HOOKS is a list of entries such as {{NAME: EMAHook, DECAY: 0.999}}; got {entry!r}")
    name, enabled = entry["NAME"], entry.get("ENABLED", True)
    look_up(HOOK_REGISTRY, name, "HOOKS")
    if not isinstance(enabled, bool):
        raise ConfigError(f"HOOKS: {name}: ENABLED must be True or False, got {enabled!r}")
    place = {key.lower(): entry[key] for key in _PLACES if entry.get(key) is not None}
    if len(place) > 1:
        raise ConfigError(f"HOOKS: {name}: give one of {', '.join(_PLACES)}; an anchor has a priority already")
    try:
        sort_key(place.get("priority", 0))
    except ValueError as error:
        raise ConfigError(f"HOOKS: {name}: {error}") from None
    arguments = {key.lower(): value for key, value in entry.items() if key not in ("NAME", "ENABLED", *_PLACES)}
    return _Entry(name, enabled, place, arguments)


def _required(hook_class: Callable[..., HookBase]) -> list[str]:
    """The names of the constructor's arguments without a default."""
    return [
        name
        for name, parameter in inspect.signature(hook_class).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _acts_on_evaluation(hook: type[HookBase] | HookBase) -> bool:
    return any(overrides(hook, point) for point in ("evaluated_models", *EVALUATION_POINTS))
