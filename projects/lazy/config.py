"""Configs written in Python, with calls that are made later."""

import builtins
import importlib
import logging
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
    path_of,
    to_container,
    to_node,
    to_plain,
    update,
    with_paths,
)

from trainkit.config import CfgNode, get_cfg
from trainkit.config.yaml_files import Dumper, load_yaml, parse_literal, read_yaml
from trainkit.utils.device import resolve_device
from trainkit.utils.errors import ConfigError, UnknownKeyError
from trainkit.utils.file_io import refuse_pipe
from trainkit.utils.registry import did_you_mean

_logger = logging.getLogger(__name__)


class LazyCall:
    """``LazyCall(target)(**arguments)`` gives a node that describes a call; `instantiate` makes the call.

    ``target`` is a callable, its dotted path, or a node that describes a call which returns a callable. The node holds
    the arguments, which can be changed, and the target under ``_target_``; of a dataclass, an attrs class or a
    dict it holds the dotted path.

    Raises:
        TypeError: ``target`` is neither of these.
    """

    def __init__(self, target: Callable[..., Any] | str | Mapping[Any, Any]) -> None:
        if not callable(target) and not isinstance(target, str | Mapping):
            raise TypeError(
                "the target of LazyCall must be a callable, its dotted path, or a node that "
                f"describes a call, got {target!r}"
            )
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
            return to_node(_public_nodes(content) if is_python else content)
        found = []
        for name in [keys] if isinstance(keys, str) else keys:
            if name not in content:
                raise ConfigError(f"{path} has no {name!r}; {_nearest(name, content)}")
            value = content[name]
            found.append(to_node(value) if is_node(value) else value)
        return found[0] if isinstance(keys, str) else tuple(found)

    @staticmethod
    def load_rel(filename: str | os.PathLike[str], keys: str | Sequence[str] | None = None) -> Any:
        """``load`` with a path relative to the file of the calling code."""
        # inspect.stack() would touch every module
        folder = os.path.dirname(sys._getframe(1).f_code.co_filename)
        return LazyConfig.load(os.path.join(folder, filename), keys)

    @staticmethod
    def save(cfg: Any, filename: str | os.PathLike[str]) -> None:
        """Write ``cfg`` as YAML, from which ``load`` makes the same calls; references stay references.

        Targets are written by their names. A function or class as an argument becomes a call of `locate`, by which
        `instantiate` finds it again. Of another value that YAML cannot hold, such as a lambda, only the name is
        written, with a warning; ``filename`` + ".pkl" then holds the whole config, for ``cloudpickle.load``.
        """
        text, lost = _dump(cfg)
        Path(filename).write_text(text, encoding="utf-8")
        if lost:
            names = ", ".join(lost)
            _logger.warning("The saved config has only the names of these values: %s", names)
            _save_pickle(cfg, f"{os.fspath(filename)}.pkl")

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
        """``cfg`` as readable code in the layout of black, sorted by key; references are resolved."""
        lines = _to_lines(prefix.rstrip("."), with_paths(to_plain(cfg, resolve=True)))
        return "".join(f"{line}\n" for line in lines)


def _public_nodes(content: Mapping[str, Any]) -> dict[str, Any]:
    nodes = {}
    for name, value in content.items():
        if not name.startswith("_") and is_node(value):
            nodes[name] = value
    return nodes


def instantiate(cfg: Any) -> Any:
    """Make every call that ``cfg`` describes, inner calls first.

    ``cfg``, a node, dict, list or tuple, stays unchanged; a value without a call is returned as it is. Targets get
    dicts and lists, never omegaconf's types. Raises ConfigError: a target is not found, or raises a TypeError or
    ValueError; the message has its name and those of its arguments. Other errors are not changed.
    """
    cfg = to_container(cfg, resolve=True)
    if type(cfg) in (list, tuple):
        return type(cfg)(instantiate(item) for item in cfg)
    if type(cfg) is not dict:
        return cfg
    values = {name: instantiate(item) for name, item in cfg.items()}
    if TARGET not in values:
        has_call = any(values[name] is not item for name, item in cfg.items())
        return values if has_call else cfg
    target = values.pop(TARGET)
    try:
        function = locate(target) if isinstance(target, str) else target
        return function(**values)
    # raised by constructors for wrong arguments
    except (ImportError, TypeError, ValueError) as error:
        call = f"{name_of(target)}({', '.join(map(str, values))})"
        raise ConfigError(f"{call} failed: {type(error).__name__}: {error}") from error


def to_cfg(cfg: Any, args: Any) -> tuple[CfgNode, str, list[str]]:
    """What `default_setup` reads: the settings in ``cfg.train``, the text that `LazyConfig.save` writes, what it loses.

    ``cfg`` is changed: ``train.output_dir`` becomes absolute, and a ``train.device`` of "auto" the device that is used;
    with ``--num-gpus 0`` this is the CPU. Raises ConfigError: there is no ``train.output_dir``, or it is an address.
    """
    if getattr(args, "num_gpus", 1) == 0:
        cfg.train.device = "cpu"
    train = cfg.get("train", {})
    if not train.get("output_dir"):
        names = ", ".join(map(str, cfg))
        raise ConfigError(f"train.output_dir is missing in the config, which has {names}; set it")
    if "://" in train.output_dir:
        raise ConfigError(
            f"train.output_dir is {train.output_dir!r}; only a config of get_cfg accepts an address"
        )
    text, lost = _dump(cfg)
    train.output_dir = os.path.abspath(os.path.expanduser(train.output_dir))
    if train.get("device") == "auto":
        train.device = str(resolve_device("auto"))
    settings = get_cfg()
    settings.OUTPUT_DIR = train.output_dir
    settings.MODEL.WEIGHTS = train.get("init_checkpoint") or ""
    settings.CUDNN_BENCHMARK = bool(train.get("cudnn_benchmark"))
    settings.SEED = -1
    if train.get("seed") is not None:
        settings.SEED = train.seed
    settings.NUM_THREADS = train.get("num_threads") or 0
    return settings, text, lost


def reload_lazy_config(cfg: Any) -> Any:
    """The config that ``LazyConfig.load`` gives after a ``LazyConfig.save``, for tests."""
    text, _ = _dump(cfg)
    return to_node(load_yaml(text, "the saved config"))


def _dump(cfg: Any) -> tuple[str, list[str]]:
    """``cfg`` as YAML, and the names of the values that YAML cannot hold."""
    lost: list[str] = []

    class Names(Dumper):
        def represent_undefined(self, data: Any) -> yaml.Node:
            path = path_of(data)
            if isinstance(path, str) and not path.startswith("__main__."):
                return self.represent_dict({TARGET: path_of(locate), "name": path})
            name = name_of(data)
            lost.append(name)
            return self.represent_str(name)

    Names.add_representer(None, Names.represent_undefined)
    text: str = yaml.dump(with_paths(to_plain(cfg)), Dumper=Names, sort_keys=False)
    return text, lost


def _save_pickle(cfg: Any, path: str) -> None:
    try:
        content = importlib.import_module("cloudpickle").dumps(cfg)
    except Exception as error:  # a value may raise anything when it is pickled
        _logger.warning("%s is not written: %s: %s", path, type(error).__name__, error)
        return
    Path(path).write_bytes(content)
    _logger.warning("The whole config is in %s, for cloudpickle.load", path)


def _check_key(node: Any, names: Sequence[str], *, may_be_new: bool) -> None:
    for i, name in enumerate(names):
        here = ".".join(names[: i + 1])
        is_list = isinstance(node, Sequence) and not isinstance(node, str)
        if is_list and name.isdigit() and int(name) < len(node):
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
    is_node_of_settings = isinstance(value, dict) and TARGET not in value
    if not value or not is_node_of_settings:
        return _lay_out(f"{name} = ", value, "")
    lines = []
    for key in sorted(value, key=str):
        lines += _to_lines(f"{name}.{key}".lstrip("."), value[key])
    return lines


_COLUMNS = 88  # of black


def _lay_out(head: str, value: Any, tail: str) -> list[str]:
    """The lines of ``head``, the code of ``value`` and ``tail``, as black breaks them.

    An item or the arguments of a call move to a line of their own if they fit there, else one stands on each line.
    """
    line = head + _to_code(value) + tail
    opening, items, closing = _parts(value)
    if len(line) <= _COLUMNS or not items:
        return [line]
    indent = " " * (len(head) - len(head.lstrip())) + "    "
    is_call = opening.endswith("(")
    codes = [name + _to_code(item) for name, item in items]
    inside = indent + ", ".join(codes)
    if len(inside) <= _COLUMNS and (is_call or len(items) == 1):
        return [head + opening, inside, indent[4:] + closing + tail]
    comma = "," if len(items) > 1 else ""
    lines = [head + opening]
    for name, item in items:
        lines += _lay_out(indent + name, item, comma)
    return [*lines, indent[4:] + closing + tail]


def _to_code(value: Any) -> str:
    """``value`` in one line."""
    opening, items, closing = _parts(value)
    codes = [name + _to_code(item) for name, item in items]
    return opening + ", ".join(codes) + closing


def _parts(value: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """The opening bracket, the items with their names, the closing bracket; of a plain value its code alone."""
    if isinstance(value, list):
        return "[", [("", item) for item in value], "]"
    if isinstance(value, str):
        return _quoted(value), [], ""
    if not isinstance(value, dict):
        return repr(value), [], ""
    keys = sorted((key for key in value if key != TARGET), key=str)
    if TARGET in value:
        arguments = [(f"{key}=", value[key]) for key in keys]
        return f"{name_of(value[TARGET])}(", arguments, ")"
    items = [(f"{_to_code(key)}: ", value[key]) for key in keys]
    return "{", items, "}"


def _quoted(text: str) -> str:
    code = repr(text)
    if code.startswith("'") and '"' not in text:
        return f'"{code[1:-1]}"'
    return code


def run_file(path: str) -> ModuleType:
    """Run a config file as a module of its own, which is not in ``sys.modules``.

    Raises ConfigError: the file cannot be read. Errors of its code are not changed.
    """
    try:
        refuse_pipe(path)
        source = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot read the config file {path!r}: {reason}") from error
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
    folder = Path(path).parent
    for _ in range(level - 1):
        folder = folder.parent
    wanted = str(folder.joinpath(*name.split("."))) + ".py"
    if not os.path.isfile(wanted):
        given = "." * level + name
        raise ImportError(f"{path}: the relative import from {given!r}: {wanted} does not exist")
    module = run_file(wanted)
    names = fromlist or ()
    if "*" in names:
        names = list(vars(module))
    for imported in names:
        value = vars(module).get(imported)
        if isinstance(value, dict) and not imported.startswith("_"):
            setattr(module, imported, to_node(value))
    return module
