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
    enabled: bool
    place: dict[str, Any]  # at most one of priority, before, after
    arguments: dict[str, Any]


class ConfiguredHooks:
    """The entries of ``HOOKS``. Each becomes a hook when ``build_hooks`` reaches its place.

    An entry is ``{NAME: a name in HOOK_REGISTRY, ...}`` with the constructor's arguments in upper case. ``ENABLED:
    False`` switches off a default hook; one of ``PRIORITY``, ``BEFORE`` and ``AFTER`` moves a hook. A required argument
    ``cfg``, ``model``, ``optimizer``, ``checkpointer`` or ``data_loader`` that the entry does not give is taken from
    the trainer.

    Raises:
        ConfigError: an entry is malformed; its name is unknown; an argument is unknown, missing or refused. Some of
            these errors are raised only when the hook is made.
    """

    def __init__(self, entries: Iterable[Any], trainer: Any) -> None:
        self._entries = [_parse(entry) for entry in entries]
        self._trainer = trainer
        self._anchored: list[tuple[HookBase, dict[str, Any]]] = []

    def take(self, hook_class: type[HookBase], *, default: bool = True, **arguments: Any) -> list[HookBase]:
        """The hooks of one class; ``arguments`` are the defaults of arguments that the entries do not give.

        Args:
            default: make one hook with ``arguments`` if no entry names the class.
        """
        mine = [entry for entry in self._entries if entry.name == hook_class.__name__]
        # entries that disable the class stay, because it may be taken twice
        self._entries = [entry for entry in self._entries if entry not in mine or not entry.enabled]
        if not mine and default:
            return [_construct(hook_class, arguments, "")]
        return self._make(mine, arguments)

    def rest(self) -> list[HookBase]:
        """All hooks that have not been taken, in the order of their entries."""
        mine, self._entries = self._entries, []
        return self._make(mine, {})

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
            if of_training:
                if acts:
                    logger.warning("HOOKS: %s is left out: without training there is no %s", entry.name, of_training[0])
            elif acts or absent.issubset(_FROM_TRAINER):  # make the hook first: some set their points on the object
                hooks += filter(_acts_on_evaluation, self._make([entry._replace(place={})], {}))
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

    def _make(self, entries: list[_Entry], arguments: dict[str, Any]) -> list[HookBase]:
        hooks = []
        for entry in [entry for entry in entries if entry.enabled]:
            hook = self._make_one(entry, arguments)
            hook.priority = entry.place.get("priority", hook.priority)
            if entry.place.keys() & {"before", "after"}:
                self._anchored.append((hook, entry.place))
            else:
                hooks.append(hook)
        return hooks

    def _make_one(self, entry: _Entry, arguments: dict[str, Any]) -> HookBase:
        hook_class = HOOK_REGISTRY.get(entry.name)
        accepted = inspect.signature(hook_class).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        for name, value in entry.arguments.items():
            if name not in accepted and not takes_any:
                raise unknown_name(f"HOOKS: {entry.name}", name.upper(), "it takes", map(str.upper, accepted))
            if name in accepted and isinstance(accepted[name].default, bool) and not isinstance(value, bool):
                raise ConfigError(f"HOOKS: {entry.name}: {name.upper()} must be True or False, got {value!r}")
        arguments = {**arguments, **entry.arguments}
        for name in _required(hook_class):
            if name not in arguments and name in _FROM_TRAINER:
                arguments[name] = getattr(self._trainer, name)
        hook = _construct(hook_class, arguments, "HOOKS: ")
        if not isinstance(hook, HookBase):
            raise ConfigError(f"HOOKS: {entry.name} gives {hook!r}, which is no HookBase object; let it return one")
        return hook


def _construct(hook_class: type[HookBase], arguments: dict[str, Any], where: str) -> HookBase:
    try:
        return hook_class(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}{hook_class.__name__}: {error}") from error


def _parse(entry: Any) -> _Entry:
    is_entry = isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry)
    if not is_entry or not isinstance(entry.get("NAME"), str):
        raise ConfigError(f"HOOKS is a list of entries such as {{NAME: EMAHook, DECAY: 0.999}}; got {entry!r}")
    name, enabled = entry["NAME"], entry.get("ENABLED", True)
    if name == "PreciseBN" and name not in HOOK_REGISTRY:  # PreciseBN needs a data loader of its own
        raise ConfigError(f"HOOKS: PreciseBN is no entry of the list; set TEST.PRECISE_BN.ENABLED to {enabled} instead")
    look_up(HOOK_REGISTRY, name, "HOOKS")
    if not isinstance(enabled, bool):
        raise ConfigError(f"HOOKS: {name}: ENABLED must be True or False, got {enabled!r}")
    place = {key.lower(): entry[key] for key in _PLACES if entry.get(key) is not None}
    if len(place) > 1:
        raise ConfigError(f"HOOKS: {name}: give one of {', '.join(_PLACES)}; an anchor has a priority already")
    if "priority" in place:
        try:
            sort_key(place["priority"])
        except ValueError as error:
            raise ConfigError(f"HOOKS: {name}: {error}") from None
    arguments = {key.lower(): value for key, value in entry.items() if key not in ("NAME", "ENABLED", *_PLACES)}
    return _Entry(name, enabled, place, arguments)


def _required(hook_class: Callable[..., HookBase]) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(hook_class).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _acts_on_evaluation(hook: type[HookBase] | HookBase) -> bool:
    return hasattr(hook, "models_to_evaluate") or any(overrides(hook, point) for point in EVALUATION_POINTS)
