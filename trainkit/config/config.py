"""CfgNode: fvcore's config node with strict merging and errors that give the full key."""

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from types import ModuleType
from typing import IO, Any

import yaml
from fvcore.common.config import CfgNode as _FvcoreCfgNode

from trainkit.config.errors import ConfigError, UnknownKeyError, not_accepted
from trainkit.config.lengths import LENGTH_FORMS, LENGTH_KEYS, parse_length
from trainkit.config.yaml_files import BASE_KEY, DELETE_KEY, Dumper, load_yaml, overlay, parse_literal, read_layers
from trainkit.utils.plugins import CONFIG_KEYS, load_plugin

_UNTYPED = "__untyped__"  # a mark in a node's __dict__, like yacs's own marks
_OF_PROJECTS = "__of_projects__"  # another one: name -> full key of the keys in this node that projects declare
_ACCEPTED = {bool: "True or False", int: "an int", float: "a float or an int", str: "text"}


class CfgNode(_FvcoreCfgNode):
    """A node of a config: keys with values or further nodes, as attributes and as items.

    Merging checks each value against the old one, and changes all values or none. A bool takes a bool, an int an int, a
    float also an int; a list or a tuple takes both (and keeps its type); a key of ``LENGTH_KEYS`` also takes epochs. A
    key with the default None takes any value, and so does a key that merging has added to a node with ``new_allowed``.
    """

    def __getattr__(self, name: str) -> Any:
        _declare(self, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, val: Any) -> None:
        _declare(self, name)
        was_none = name in self and self[name] is None
        super().__setattr__(name, val)
        if was_none:
            _untyped_keys(self).add(name)

    @classmethod
    def load_yaml_with_base(cls, filename: str | os.PathLike[str], allow_unsafe: bool = False) -> dict[str, Any]:
        """Read a file after the files that it inherits from by ``_BASE_`` (a path or a list, relative to the file).

        ``_DELETE_: True`` in a node removes the settings of this node from the inherited files.

        Raises:
            ConfigError: see ``merge_from_file``.
        """
        if allow_unsafe:
            raise not_accepted("allow_unsafe", allow_unsafe, "False; YAML that runs code is never read")
        return reduce(overlay, (layer for _, layer in read_layers(filename)), {})

    @classmethod
    def load_cfg(cls, cfg_file_obj_or_str: str | IO[str]) -> "CfgNode":
        """A new config from YAML text or an open YAML file; any key is accepted."""
        name = getattr(cfg_file_obj_or_str, "name", "<text>")
        return cls(plain_value(name, load_yaml(cfg_file_obj_or_str, name)))

    def merge_from_file(self, cfg_filename: str | os.PathLike[str], allow_unsafe: bool = False) -> None:
        """Merge a YAML file, after the files that it inherits from (see ``load_yaml_with_base``).

        Args:
            allow_unsafe: for detectron2's signature only; YAML that runs code is never read.

        Raises:
            ConfigError: a file cannot be read, is not safe YAML, or has a wrong key or value.
        """
        if allow_unsafe:
            raise not_accepted("allow_unsafe", allow_unsafe, "False; YAML that runs code is never read")
        *bases, (top, own) = read_layers(cfg_filename)
        content: dict[str, Any] = {}
        for path, layer in bases:
            with _named(path):
                list(_changes(self, overlay({}, layer), self))
            content = overlay(content, layer)
        with _named(top):
            self.merge_from_other_cfg(overlay(content, own))

    def merge_from_other_cfg(self, cfg_other: Mapping[str, Any]) -> None:
        """Merge another config or a nested dict. Raises ConfigError if a key or value is wrong."""
        if self.is_frozen():
            raise ConfigError("the config is frozen; call defrost() before merging")
        _merge(self, cfg_other, self)

    def merge_from_list(self, cfg_list: Sequence[Any]) -> None:
        """Merge ``[KEY, VALUE, KEY, VALUE, ...]``, such as the last options of a command line.

        A VALUE of type str is read as a Python literal. It stays text if it is not a literal, or if its key takes text.

        Raises:
            ConfigError: the items are not in pairs, or a key or value is wrong.
        """
        if len(cfg_list) % 2:
            raise not_accepted("options", [*cfg_list], "KEY VALUE KEY VALUE ...")
        layers = []
        for full_key, value in zip(cfg_list[::2], cfg_list[1::2], strict=True):
            if self.key_is_deprecated(full_key):  # this logs a warning
                continue
            layer: Any = _OptionText(value) if isinstance(value, str) else value
            for name in reversed(full_key.split(".")):
                layer = {name: layer}
            list(_changes(self, layer, self))  # checks all of them before the first change
            layers.append(layer)
        for layer in layers:
            self.merge_from_other_cfg(layer)

    def dump(self, **kwargs: Any) -> str:
        """The config as YAML that ``merge_from_file`` reads back; ``kwargs`` are those of ``yaml.dump``."""
        return yaml.dump({name: plain_value(name, value) for name, value in self.items()}, Dumper=Dumper, **kwargs)


def mark_keys_of_projects(root: CfgNode) -> None:
    """Let projects declare their keys in ``root``, and in its copies, when these keys are first used."""
    for full_key in CONFIG_KEYS:
        parent, _, name = full_key.rpartition(".")
        node = reduce(getitem, filter(None, parent.split(".")), root)
        node.__dict__.setdefault(_OF_PROJECTS, {})[name] = full_key


def projects_of(cfg: CfgNode) -> Iterator[ModuleType]:
    """The modules that declare keys which are in ``cfg``, see `CONFIG_KEYS`; each once."""
    found: dict[str, None] = {}
    for full_key, module in CONFIG_KEYS.items():
        node: Any = cfg
        for name in full_key.split("."):
            node = node.get(name) if isinstance(node, CfgNode) else None
        if node is not None:
            found[module] = None
    yield from map(load_plugin, found)


def _declare(node: _FvcoreCfgNode, name: object) -> None:
    """Add the key ``name`` with its default, if a project declares it and it is not there yet."""
    full_key = node.__dict__.get(_OF_PROJECTS, {}).get(name)
    if full_key is None or name in node:
        return
    defaults = CfgNode()
    for key in CONFIG_KEYS:
        reduce(lambda parent, part: parent.setdefault(part, CfgNode()), key.split(".")[:-1], defaults)
    load_plugin(CONFIG_KEYS[full_key]).add_config(defaults)
    value = reduce(getitem, full_key.split("."), defaults)
    if isinstance(value, CfgNode) and node.is_frozen():
        value.freeze()
    node[name] = value


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Context that names the file in the errors of a merge."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None


def _untyped_keys(node: _FvcoreCfgNode) -> set[str]:
    """Names of the keys without a declared type."""
    return node.__dict__.setdefault(_UNTYPED, set())


class _OptionText(str):
    """The text of a value on the command line; the type of its key decides how it is read."""

    def read(self, full_key: str, declared: object) -> Any:
        text = str(self)
        value = parse_literal(text)
        if isinstance(declared, str) and not isinstance(value, str) and full_key not in LENGTH_KEYS:
            return text  # text that looks like a number, such as OUTPUT_DIR 2024
        if isinstance(declared, float) and isinstance(value, str):
            with contextlib.suppress(ValueError):
                return float(value)  # numbers that are no literals, such as inf
        return value


def _merge(node: _FvcoreCfgNode, other: Mapping[str, Any], root: _FvcoreCfgNode, prefix: str = "") -> None:
    """Merge a mapping into the node of ``root`` whose key is ``prefix`` (it ends with a dot): all values, or none."""
    for owner, name, value in list(_changes(node, other, root, prefix)):
        if owner.get(name) is None:
            _untyped_keys(owner).add(name)
        owner[name] = value


def _changes(
    node: _FvcoreCfgNode, other: Mapping[str, Any], root: _FvcoreCfgNode, prefix: str = ""
) -> Iterator[tuple[_FvcoreCfgNode, str, Any]]:
    """(node, key, new value) of each change that `_merge` makes."""
    for name, value in other.items():
        full_key = f"{prefix}{name}"
        _declare(node, name)
        old = node.get(name)
        is_typed = old is not None and name not in _untyped_keys(node)
        if isinstance(value, _OptionText):
            value = value.read(full_key, old if is_typed else None)
        if isinstance(old, _FvcoreCfgNode) and isinstance(value, Mapping):
            yield from _changes(old, value, root, full_key + ".")
        elif is_typed:
            coerced = _coerce(full_key, value, old)
            if full_key != "VERSION":
                yield node, name, coerced
            elif value not in (old, 2):  # 2: detectron2's version; its keys mean the same here
                raise ConfigError(f"this config is of VERSION {value}, and VERSION {old} is read here; update its keys")
        elif name not in node and root.key_is_deprecated(full_key):  # this logs a warning
            continue
        else:
            if name not in node:
                _check_new_key(node, name, value, root, full_key)
            if isinstance(value, Mapping):
                new = type(root)(new_allowed=True)
                _merge(new, value, root, full_key + ".")
                yield node, name, new
            else:
                yield node, name, plain_value(full_key, value)


def _check_new_key(node: _FvcoreCfgNode, name: object, value: object, root: _FvcoreCfgNode, full_key: str) -> None:
    if not isinstance(name, str) or "." in name or name in (BASE_KEY, DELETE_KEY):
        accepted = f"a name without dots; {BASE_KEY} at the top of a file, {DELETE_KEY} in a node of a file"
        raise not_accepted(f"key {full_key}", name, accepted)
    if root.key_is_renamed(full_key):
        try:
            root.raise_key_rename_error(full_key)
        except KeyError as error:
            raise UnknownKeyError(error.args[0]) from None
    if not node.is_new_allowed():
        while isinstance(value, Mapping) and value:  # the innermost key shows best which key was meant
            name, value = next(iter(value.items()))
            full_key = f"{full_key}.{name}"
        known = {key.upper(): key for key in _full_keys(root) if _is_near(full_key, key)}
        nearest = difflib.get_close_matches(full_key.upper(), known, n=1)
        hint = f"did you mean {known[nearest[0]]}?" if nearest else "no key has a similar name"
        raise UnknownKeyError(f"unknown key {full_key}; {hint}")


def _is_near(key: str, known: str) -> bool:
    """Whether the last parts of two keys are similar, or one contains the other; the nodes before them are ignored."""
    own, other = (full.upper().rpartition(".")[2] for full in (key, known))
    return own in other or other in own or bool(difflib.get_close_matches(own, [other], cutoff=0.7))


def _full_keys(node: _FvcoreCfgNode, prefix: str = "") -> Iterator[str]:
    """The keys below a node, without the nodes."""
    for name, value in node.items():
        is_node = isinstance(value, _FvcoreCfgNode)
        yield from _full_keys(value, f"{prefix}{name}.") if is_node else [f"{prefix}{name}"]


def _coerce(full_key: str, value: object, old: object) -> object:
    is_length = full_key in LENGTH_KEYS
    if isinstance(old, _FvcoreCfgNode):
        raise not_accepted(full_key, value, "a node, that is keys with values")
    if isinstance(old, list | tuple):
        items = parse_literal(value) if isinstance(value, str) else value  # YAML has no tuples: (1, 2) is text there
        if not isinstance(items, list | tuple):
            raise not_accepted(
                full_key, value, f"a list, each item {LENGTH_FORMS}" if is_length else "a list or a tuple"
            )
        for item in items if is_length else ():
            parse_length(item, full_key)
        inner = tuple if old and all(isinstance(item, tuple) for item in old) else list
        plain = (plain_value(full_key, item) for item in items)
        return type(old)(inner(item) if isinstance(item, list) else item for item in plain)
    if is_length:
        parse_length(value, full_key)
        return value
    kind = next(kind for kind in _ACCEPTED if isinstance(old, kind))  # bool comes first, since a bool is an int
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise not_accepted(full_key, value, _ACCEPTED[kind])
    return kind(value)


def plain_value(full_key: str, value: object) -> Any:
    """A copy with only the types that YAML reads, so that a dump can be read as an equal config."""
    if isinstance(value, Mapping):
        return {key: plain_value(f"{full_key}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(full_key, item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise not_accepted(full_key, value, "text, a number, True, False, None, and lists or nodes of them")
