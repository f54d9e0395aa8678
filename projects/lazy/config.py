"""Configs written in Python, with calls that are made later."""

import builtins
import logging
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from trainkit.projects.lazy.nodes import (
    TARGET,
    is_node,
    locate,
    name_of,
    to_container,
    to_node,
    to_plain,
    update,
)

from trainkit.config import CfgNode, get_cfg
from trainkit.config.yaml_files import Dumper, load_yaml, parse_literal, read_yaml
from trainkit.utils.errors import ConfigError, UnknownKeyError
from trainkit.utils.registry import did_you_mean

_logger = logging.getLogger(__name__)


class LazyCall:
    """``LazyCall(target)(**arguments)`` gives a node that describes a call; `instantiate` makes the call.

    ``target`` is a callable, its dotted path, or a node that describes a call which returns a callable. The node holds
    the arguments, which can be changed, and under ``_target_`` the dotted path; the target itself if it has no path.
    """

    def __init__(self, target: Callable[..., Any] | str | Mapping[Any, Any]) -> None:
        self._target = target

    def __call__(self, **arguments: Any) -> Any:
        return to_node({TARGET: self._target, **arguments})


class LazyConfig:
    """Loads configs from Python and YAML files, changes them, and saves them as YAML."""

    @staticmethod
    def load(filename: str | os.PathLike[str], keys: str | Sequence[str] | None = None) -> Any:
        """Run a ``.py`` file, or read another one as YAML, which runs no code.

        In a config file, ``from .other import name`` imports from the config file ``other.py`` in the same folder; two
        dots mean one folder up. ``other.py`` is run for each import, so that each importer changes its own copy; its
        dicts become nodes. No global state is patched, so several threads may load.

        Returns the value of one name, a tuple for several ``keys``. Without ``keys`` a node: of all names of a YAML
        file, or all nodes of a Python file whose names do not start with ``_``. Inside nodes, tuples become lists, and
        dataclasses become calls that make them. Raises ConfigError: a file cannot be read or lacks a name.
        """
        path = os.path.abspath(os.path.expanduser(filename))
        is_python = path.endswith(".py")
        content = vars(run_file(path)) if is_python else read_yaml(path)
        if keys is None:
            nodes = {
                name: value
                for name, value in content.items()
                if not name.startswith("_") and is_node(value)
            }
            return to_node(nodes if is_python else content)
        names = [keys] if isinstance(keys, str) else list(keys)
        if missing := [name for name in names if name not in content]:
            raise ConfigError(f"{path} has no {missing[0]!r}; {_nearest(missing[0], content)}")
        found = [
            to_node(content[name]) if is_node(content[name]) else content[name] for name in names
        ]
        return found[0] if isinstance(keys, str) else tuple(found)

    @staticmethod
    def load_rel(filename: str | os.PathLike[str], keys: str | Sequence[str] | None = None) -> Any:
        """``load`` with a path relative to the file of the calling code."""
        folder = os.path.dirname(
            sys._getframe(1).f_code.co_filename
        )  # inspect.stack() would touch every module
        return LazyConfig.load(os.path.join(folder, filename), keys)

    @staticmethod
    def save(cfg: Any, filename: str | os.PathLike[str]) -> None:
        """Write ``cfg`` as YAML, from which ``load`` makes the same calls; references stay references.

        Of a value that YAML cannot hold, such as a function as an argument, only the name is written, with a warning.
        """
        Path(filename).write_text(to_yaml(cfg), encoding="utf-8")

    @staticmethod
    def apply_overrides(cfg: Any, overrides: Sequence[str]) -> Any:
        """Change ``cfg`` by items such as ``model.width=32``, and return it.

        A value is a Python literal, a list or node of YAML in one line, ``null``, ``true``, ``false``, or else text. A
        node is merged into the existing node. Write a new key with a plus, ``+model.dropout=0.1``. Without the plus it
        is added with a warning, or refused if an existing key is similar. Raises ConfigError: an item is malformed, or
        there is no such key; the message has the nearest key.
        """
        for item in overrides:
            key, equals, text = item.partition("=")
            names = key.lstrip("+").split(".")
            if not equals or "" in names:
                raise ConfigError(
                    f"overrides are written key=value, such as model.width=32, got {item!r}"
                )
            _check_key(cfg, names, may_be_new=key.startswith("+"))
            update(cfg, ".".join(names), parse_literal(text))
        return cfg

    @staticmethod
    def to_py(cfg: Any, prefix: str = "cfg.") -> str:
        """``cfg`` as readable lines of Python, one per value or call; references are resolved."""
        return "\n".join(_to_lines(prefix.rstrip("."), to_plain(cfg, resolve=True)))


def instantiate(cfg: Any) -> Any:
    """Make every call that ``cfg`` describes, inner calls first.

    ``cfg``, a node, dict, list or tuple, stays unchanged; a value without a call is returned as it is. Targets get
    dicts and lists, never omegaconf's types. Raises ConfigError: a target is not found, or raises a TypeError or
    ValueError; the message has its name and those of its arguments. Other errors are not changed.
    """
    cfg = to_container(cfg, resolve=True)
    if type(cfg) in (list, tuple):
        return type(cfg)(map(instantiate, cfg))
    if type(cfg) is not dict:
        return cfg
    values = {name: instantiate(item) for name, item in cfg.items()}
    if TARGET not in values:
        return cfg if all(map(operator.is_, values.values(), cfg.values())) else values
    target = values.pop(TARGET)
    try:
        return (locate(target) if isinstance(target, str) else target)(**values)
    except (
        ImportError,
        TypeError,
        ValueError,
    ) as error:  # raised by constructors for wrong arguments
        call = f"{name_of(target)}({', '.join(map(str, values))})"
        raise ConfigError(f"{call} failed: {type(error).__name__}: {error}") from error


def to_cfg(cfg: Any, args: Any) -> tuple[CfgNode, str]:
    """The settings in ``cfg.train`` that `default_setup` reads, and the text that `LazyConfig.save` writes.

    ``cfg`` is changed: ``train.output_dir`` becomes absolute, and with ``--num-gpus 0`` the device is the CPU. Raises
    ConfigError: there is no ``train.output_dir``, or it is an address.
    """
    if getattr(args, "num_gpus", 1) == 0:
        cfg.train.device = "cpu"
    train, settings = cfg.get("train", {}), get_cfg()
    if not train.get("output_dir"):
        raise ConfigError(
            f"train.output_dir is missing in the config, which has {', '.join(map(str, cfg))}; set it"
        )
    if "://" in train.output_dir:
        raise ConfigError(
            f"train.output_dir is {train.output_dir!r}; only a config of get_cfg accepts an address"
        )
    text = to_yaml(cfg)
    train.output_dir = os.path.abspath(os.path.expanduser(train.output_dir))
    settings.OUTPUT_DIR, settings.MODEL.WEIGHTS = (
        train.output_dir,
        train.get("init_checkpoint") or "",
    )
    settings.CUDNN_BENCHMARK = bool(train.get("cudnn_benchmark"))
    settings.SEED = -1 if train.get("seed") is None else train.seed
    return settings, text


def reload_lazy_config(cfg: Any) -> Any:
    """The config that ``LazyConfig.load`` gives after a ``LazyConfig.save``, for tests."""
    return to_node(load_yaml(to_yaml(cfg), "the saved config"))


def to_yaml(cfg: Any) -> str:
    """The text that `LazyConfig.save` writes."""
    lost: list[str] = []

    class Names(Dumper):
        def represent_undefined(self, data: Any) -> yaml.Node:
            lost.append(name_of(data))
            return self.represent_str(lost[-1])

    Names.add_representer(None, Names.represent_undefined)
    text: str = yaml.dump(to_plain(cfg), Dumper=Names, sort_keys=False)
    if lost:
        _logger.warning("The saved config has only the names of these values: %s", ", ".join(lost))
    return text


def _check_key(node: Any, names: Sequence[str], *, may_be_new: bool) -> None:
    for i, name in enumerate(names):
        here = ".".join(names[: i + 1])
        if (
            isinstance(node, Sequence)
            and not isinstance(node, str)
            and name.isdigit()
            and int(name) < len(node)
        ):
            node = node[int(name)]
        elif not isinstance(node, Mapping):
            raise UnknownKeyError(f"{here}: {node!r} is neither a node nor a long enough list")
        elif name in node:
            node = node[name]
        elif may_be_new:
            return
        elif did_you_mean(name, map(str, node)) or not name.isidentifier():
            raise UnknownKeyError(
                f"there is no {here!r}; {_nearest(name, node)} (new keys: +{here}=...)"
            )
        else:
            key = ".".join(names)
            _logger.warning("%s is used as a new key; write +%s if this is what you mean", key, key)
            return


def _nearest(name: str, known: Mapping[Any, Any]) -> str:
    public = [str(key) for key in known if not str(key).startswith("_")]
    return did_you_mean(name, public).rstrip() or f"there are: {', '.join(public)}"


def _to_lines(name: str, value: Any) -> list[str]:
    if isinstance(value, dict) and value and TARGET not in value:
        return [
            line
            for key, item in value.items()
            for line in _to_lines(f"{name}.{key}".lstrip("."), item)
        ]
    return [f"{name} = {_to_code(value)}"]


def _to_code(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_to_code, value))}]"
    if not isinstance(value, dict):
        return repr(value)
    if TARGET not in value:
        return f"{{{', '.join(f'{name!r}: {_to_code(item)}' for name, item in value.items())}}}"
    arguments = ", ".join(
        f"{name}={_to_code(item)}" for name, item in value.items() if name != TARGET
    )
    return f"{name_of(value[TARGET])}({arguments})"


def run_file(path: str) -> ModuleType:
    """Run a config file as a module of its own, which is not in ``sys.modules``.

    Raises ConfigError: the file cannot be read. Errors of its code are not changed.
    """
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path!r}: {error.strerror}") from error
    module = ModuleType(f"<config {path}>")
    # An import statement calls __import__ of its own namespace, so this changes no other code
    own_builtins = {**vars(builtins), "__import__": partial(_import, path)}
    vars(module).update(__file__=path, __builtins__=own_builtins)
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    return module


def _import(
    path: str,
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """The import statement of the config file ``path``; a relative import runs the named file."""
    if level == 0:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    folder = os.path.join(os.path.dirname(path), *[os.pardir] * (level - 1))
    wanted = os.path.normpath(os.path.join(folder, *name.split("."))) + ".py"
    if not os.path.isfile(wanted):
        raise ImportError(
            f"{path}: the relative import from {'.' * level + name!r}: {wanted} does not exist"
        )
    module = run_file(wanted)
    for imported in list(vars(module)) if "*" in (fromlist or ()) else fromlist or ():
        value = vars(module).get(imported)
        if isinstance(value, dict) and not imported.startswith("_"):
            setattr(module, imported, to_node(value))
    return module
