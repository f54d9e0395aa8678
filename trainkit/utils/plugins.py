"""Find what projects bring.

A project says it in its module ``plugin``; docs/extending.md shows one. Projects of trainkit are
found in the folders of `trainkit.projects`, packages of others by the entry point group
``trainkit.projects``. The core knows none of them by name.
"""

import argparse
import functools
import importlib
import importlib.metadata
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from operator import attrgetter
from types import ModuleType
from typing import Any

_logger = logging.getLogger(__name__)

GROUP = "trainkit.projects"
"""The package with the projects of trainkit, and the entry point group of those of others."""


def _nothing(*arguments: Any) -> None:
    """In place of a function that a plug-in does not have."""


def _no_keys(cfg: Any) -> list[str]:
    """In place of ``unused_keys`` that a plug-in does not have."""
    return []


def _same_config(cfg: Any, num_ranks: int) -> Any:
    """In place of ``scale`` that a plug-in does not have."""
    return cfg


def _same(cfg: Any, part: Any) -> Any:
    """In place of a wrapper that a plug-in does not have."""
    return part


@dataclass(frozen=True, eq=False)
class Plugin:
    """What one module ``plugin`` says.

    The module may leave out each of these names; those of data are in capitals there.

    Attributes:
        module: the name of the module.
        order: plug-ins are asked in this order, and if it is the same, in that of their names.
        names: the name of a class, function or module, also of one in a registry -> the module that
            has it.
        lends: a package of trainkit -> those of ``names`` that can be imported from there.
        run_hooks: those of ``names`` that are hook classes of every `DefaultTrainer`, see
            `HookBase.is_needed`. Such a class takes no arguments, and its ``priority`` says where
            the hook stands.
        length_lists: keys of the config that hold lists of entries, in which each text such as
            "3ep" is a length.
        formats: registered names of checkpoint formats; an entry of a file, or the suffix of its
            name, says which one wrote it.
        config_types: the type of a config that `default_setup` and `configurable` accept beside
            CfgNode -> that one of ``names`` that reads it: a function ``(cfg, args)`` that returns
            a CfgNode with the settings that `default_setup` needs, and the text of config.yaml.
        options: options of the command line, such as ``"--fork"``.
        add_options: ``add_options(parser)`` adds them to the parser of `default_argument_parser`.
        apply_options: ``apply_options(cfg, args)`` is called by `default_setup` if one of them is
            given. It may change both in place, and may return a function that is called when
            OUTPUT_DIR is ready: nothing of an earlier run is in it.
        add_config: ``add_config(cfg)`` adds the keys of the config with their defaults.
        check: ``check(cfg)`` raises ConfigError if a value is wrong. This and the following
            functions are called if a key of the plug-in has another value than its default.
        unused_keys: ``unused_keys(cfg)`` returns keys of trainkit at whose values no run with this
            config looks, so every value is accepted.
        prepare: ``prepare(cfg)`` changes the config of a `DefaultTrainer`, or calls
            `comm.set_data_ranks`, before anything is built. In a config that is prepared already it
            changes nothing.
        scale: ``scale(cfg, num_ranks)`` returns the config for this number of ranks, see
            `DefaultTrainer.auto_scale_workers`.
        wrap_model: ``wrap_model(cfg, model)`` returns the model to train.
        wrap_loader: ``wrap_loader(cfg, loader)`` returns the loader to use, of training and of test
            data.
    """

    module: str
    order: int
    names: Mapping[str, str]
    lends: Mapping[str, Sequence[str]]
    run_hooks: Sequence[str]
    length_lists: Sequence[str]
    formats: Sequence[str]
    config_types: Mapping[str, str]
    options: Sequence[str]
    add_options: Callable[[argparse.ArgumentParser], None]
    apply_options: Callable[[Any, Any], Callable[[], None] | None]
    add_config: Callable[[Any], None]
    check: Callable[[Any], None]
    unused_keys: Callable[[Any], Iterable[str]]
    prepare: Callable[[Any], None]
    scale: Callable[[Any, int], Any]
    wrap_model: Callable[[Any, Any], Any]
    wrap_loader: Callable[[Any, Any], Any]


@dataclass(eq=False)
class Plugins:
    """What all plug-ins bring together; the attributes are those of `Plugin`."""

    each: list[Plugin] = field(default_factory=list)
    switched_off: list[str] = field(default_factory=list)  # a sentence for each
    names: dict[str, str] = field(default_factory=dict)
    lends: dict[str, list[str]] = field(default_factory=dict)
    run_hooks: list[str] = field(default_factory=list)
    length_lists: list[str] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)
    config_types: dict[str, str] = field(default_factory=dict)
    options: dict[str, Plugin] = field(default_factory=dict)


@functools.cache
def find_plugins() -> Plugins:
    """All plug-ins, found once in a process, when trainkit needs what it does not have itself.

    A plug-in that cannot be imported is switched off with a warning.

    Raises:
        ValueError: two bring the same name.
    """
    found = Plugins()
    for module_name, load_module in _modules():
        try:
            module = load_module()
        except Exception as error:  # a module may raise anything
            text = (
                f"The plug-in {module_name} is switched off, since it cannot be imported: "
                f"{type(error).__name__}: {error}"
            )
            found.switched_off.append(text)
            _logger.warning(text)
            continue
        found.each.append(_read(module))
    found.each.sort(key=lambda plugin: plugin.order)
    for plugin in found.each:
        _add(found, plugin)
    return found


def load(name: str) -> Any:
    """Import what a project brings under ``name``. Raises ImportError if no project brings it."""
    module = import_module_of(name)
    is_the_module = module.__name__.endswith(f".{name}")
    if is_the_module and not hasattr(module, name):
        return module
    return getattr(module, name)


def import_module_of(name: str) -> ModuleType:
    """Import the module that has ``name``. Raises ImportError if no project brings it."""
    names = find_plugins().names
    if name not in names:
        raise ImportError(f"this needs {name!r}, which no installed project brings")
    return importlib.import_module(names[name])


def lending(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a module of trainkit.

    With them it has the names that projects lend it; each is imported when it is asked for.
    """

    def get_lent(name: str) -> Any:
        # the import system and others ask every module for such names; no project lends them
        is_special = name.startswith("__")
        if is_special or name not in lent_names(package):
            # with name and obj, Python says which name was probably meant
            module = sys.modules[package]
            text = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=module)
        return load(name)

    def all_names() -> list[str]:
        own_names = vars(sys.modules[package])
        return [*own_names, *lent_names(package)]

    return get_lent, all_names


def lent_names(package: str) -> list[str]:
    """The names that projects lend to ``package``."""
    return find_plugins().lends.get(package, [])


def type_name(value: object) -> str:
    """The name of the type of ``value``, as in ``config_types``."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _modules() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The name of each module ``plugin`` and a function that imports it.

    In alphabetical order; those of others come last.
    """
    names: set[str] = set()
    for folder in importlib.import_module(GROUP).__path__:
        for package in pkgutil.iter_modules([folder]):
            path = os.path.join(folder, package.name)
            # finds also a file that is only there compiled
            if PathFinder.find_spec("plugin", [path]) is not None:
                names.add(f"{GROUP}.{package.name}.plugin")
    for name in sorted(names):
        yield name, functools.partial(importlib.import_module, name)
    entry_points = importlib.metadata.entry_points(group=GROUP)
    for entry_point in sorted(entry_points, key=attrgetter("value")):
        name = entry_point.value
        if name not in names:
            names.add(name)
            yield name, entry_point.load


def _read(module: Any) -> Plugin:
    said = vars(module)
    return Plugin(
        module=module.__name__,
        order=said.get("ORDER", 0),
        names=said.get("NAMES", {}),
        lends=said.get("LENDS", {}),
        run_hooks=said.get("RUN_HOOKS", []),
        length_lists=said.get("LENGTH_LISTS", []),
        formats=said.get("FORMATS", []),
        config_types=said.get("CONFIG_TYPES", {}),
        options=said.get("OPTIONS", []),
        add_options=said.get("add_options", _nothing),
        apply_options=said.get("apply_options", _nothing),
        add_config=said.get("add_config", _nothing),
        check=said.get("check", _nothing),
        unused_keys=said.get("unused_keys", _no_keys),
        prepare=said.get("prepare", _nothing),
        scale=said.get("scale", _same_config),
        wrap_model=said.get("wrap_model", _same),
        wrap_loader=said.get("wrap_loader", _same),
    )


def _add(found: Plugins, plugin: Plugin) -> None:
    """Add what ``plugin`` brings.

    Raises:
        ValueError: another plug-in brings a name too; a name is not in its NAMES but has to be.
    """
    _add_new(found.names, plugin.names, found)
    _add_new(found.config_types, plugin.config_types, found)
    _add_new(found.options, dict.fromkeys(plugin.options, plugin), found)
    for package, names in plugin.lends.items():
        _check_names(plugin, names)
        found.lends.setdefault(package, []).extend(names)
    _check_names(plugin, [*plugin.run_hooks, *plugin.config_types.values()])
    found.run_hooks.extend(plugin.run_hooks)
    found.length_lists.extend(plugin.length_lists)
    found.formats.extend(plugin.formats)


def _add_new(table: dict[str, Any], entries: Mapping[str, Any], found: Plugins) -> None:
    for name, value in entries.items():
        if name in table:
            modules = [plugin.module for plugin in found.each if _brings(plugin, name)]
            raise ValueError(
                f"{' and '.join(modules)} both bring {name!r}; remove one of them, or rename it "
                "there"
            )
        table[name] = value


def _brings(plugin: Plugin, name: str) -> bool:
    return name in plugin.names or name in plugin.config_types or name in plugin.options


def _check_names(plugin: Plugin, names: Iterable[str]) -> None:
    for name in names:
        if name not in plugin.names:
            raise ValueError(
                f"{plugin.module} has {name!r} in LENDS, RUN_HOOKS or CONFIG_TYPES, but not in "
                "NAMES; add it there, with the module that has it"
            )
