"""CfgNode: fvcore's config node, with errors that name the key and what is accepted."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import yaml
from fvcore.common.config import CfgNode as _FvcoreCfgNode

from trainkit.config.lengths import LENGTH_KEYS, parse_length
from trainkit.config.yaml_files import Dumper, load_yaml, parse_literal, read_with_base
from trainkit.utils.errors import ConfigError, UnknownKeyError, not_accepted
from trainkit.utils.registry import did_you_mean

# marks in a node's __dict__, like those of yacs
_OF_PROJECTS = "__of_projects__"  # name -> default of the keys of projects
_UNSET = "__unset__"  # the names whose values are defaults that nobody has set
# the names that `CfgNode.dump` leaves out while they are not set
_DUMPED_IF_SET = "__dumped_if_set__"
# keys that take values of several types
_ANY_TYPE = ("CHECKPOINT.BEST_METRIC", "SOLVER.AMP.LOSS_SCALE")
# the type of the old value, which the new one must have too -> this type in words
_ACCEPTED = {
    bool: "True or False",
    float | int: "a number",
    str: "text",
    list | tuple: "a list or a tuple",
    _FvcoreCfgNode: "a node, that is keys with values",
}


class NoSuchKeyError(AttributeError):
    """A node has no such attribute.

    The message ends with the most similar key. It is looked for only when the message is shown,
    since ``hasattr`` asks for many attributes.
    """

    def __init__(self, text: str, name: str, known: list[str]) -> None:
        super().__init__(text, name, known)

    def __str__(self) -> str:
        text, name, known = self.args
        return f"{text}. {did_you_mean(name, known)}".rstrip(". ")


class CfgNode(_FvcoreCfgNode):
    """A node of a config: keys with values or further nodes, as attributes and as items.

    Merging checks the type of each value against the old one. A number takes any number (a float
    stays a float), a list or a tuple takes both (and keeps its type), and a key of ``LENGTH_KEYS``
    also takes epochs. A single value may be replaced by None, and None by anything. A wrong key or
    value is a `ConfigError`.

    A node remembers which of its values were set: by merging, or as an attribute,
    ``cfg.SOLVER.BASE_LR = 0.1``. An item, ``cfg.SOLVER["BASE_LR"] = 0.1``, is how trainkit changes
    a value for the user; it does not count.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        _unset_names(self).discard(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            text = f"this node of the config has no key {name!r}"
            raise NoSuchKeyError(text, name, list(self)) from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]

    def is_set(self, name: str) -> bool:
        """Whether the value of ``name``, a key of this node, was set.

        False: it is the default of `get_cfg`. All values of a node that was made by hand are set.
        """
        return name in self and name not in _unset_names(self)

    @classmethod
    def load_yaml_with_base(
        cls, filename: str | os.PathLike[str], allow_unsafe: bool = False
    ) -> dict[str, Any]:
        """Read a file after those in its ``_BASE_`` (a path or a list).

        A node with ``_DELETE_: True`` replaces theirs. YAML that runs code is never read;
        ``allow_unsafe`` is for detectron2's signature.
        """
        return read_with_base(filename)

    @classmethod
    def load_cfg(cls, cfg_file_obj_or_str: str | IO[str]) -> "CfgNode":
        """A new config from YAML text or an open YAML file; any key is accepted."""
        name = getattr(cfg_file_obj_or_str, "name", "<text>")
        return cls(load_yaml(cfg_file_obj_or_str, name))

    def merge_from_file(
        self, cfg_filename: str | os.PathLike[str], allow_unsafe: bool = False
    ) -> None:
        """Merge a YAML file, see ``load_yaml_with_base``."""
        content = read_with_base(cfg_filename)
        try:
            self.merge_from_other_cfg(content)
        except ConfigError as error:
            raise type(error)(f"{cfg_filename}: {error}") from None

    def merge_from_other_cfg(self, cfg_other: Mapping[str, Any]) -> None:
        """Merge another config or a nested dict."""
        if self.is_frozen():
            raise ConfigError("the config is frozen; call defrost() before merging")
        _merge(self, cfg_other, self)

    def merge_from_list(self, cfg_list: Sequence[Any]) -> None:
        """Merge ``[KEY, VALUE, KEY, VALUE, ...]``, such as the last options of a command line.

        A VALUE of type str is read as a Python literal. It stays text if it is not a literal, or if
        its key takes text and it is not None.
        """
        if len(cfg_list) % 2 != 0:
            raise not_accepted("options", [*cfg_list], "KEY VALUE KEY VALUE ...")
        for key, value in zip(cfg_list[::2], cfg_list[1::2], strict=True):
            if isinstance(value, str):
                value = self._read_option(key, value)
            nested = value
            for name in reversed(key.split(".")):
                nested = {name: nested}
            self.merge_from_other_cfg(nested)

    def _read_option(self, key: str, text: str) -> Any:
        """The value that a text of the command line means for this key."""
        value = parse_literal(text)
        if isinstance(value, str):
            return value
        if text and value is None:
            return None
        takes_text = isinstance(get_key(self, key), str)
        takes_more = key in _ANY_TYPE or key in LENGTH_KEYS
        if takes_text and not takes_more:
            return text  # it only looks like a number, such as OUTPUT_DIR 2024
        return value

    def dump(self, **kwargs: Any) -> str:
        """The config as YAML that ``merge_from_file`` reads back.

        Keys of ``trainkit.config.defaults.MEANT_IF_SET`` that are not set are only comments at the
        end, so that they are not set in the config that is read back either. Keys of projects that
        have their defaults are left out, so that the config can also be read where the project is
        missing.

        Args:
            kwargs: those of ``yaml.dump``.
        """
        left_out: list[str] = []
        plain = _without_unset(self, "", left_out)
        text: Any = yaml.dump(plain, Dumper=Dumper, **kwargs)
        if text is not None:  # else it was written to a stream
            for line in sorted(left_out):
                text += f"# not set: {line}\n"
        return text


def _unset_names(node: _FvcoreCfgNode) -> set[str]:
    """The names in a node whose values nobody has set; none in a node that was made by hand."""
    names: set[str] = node.__dict__.get(_UNSET, set())
    return names


def mark_as_defaults(root: CfgNode, dumped_if_set: Iterable[str]) -> None:
    """Note that nobody has set the values in ``root`` and in its nodes.

    Args:
        dumped_if_set: keys that `CfgNode.dump` leaves out while they are not set.
    """
    root.__dict__[_UNSET] = set(root)
    for value in root.values():
        if isinstance(value, CfgNode):
            mark_as_defaults(value, ())
    for key in dumped_if_set:
        node = root
        *parents, name = key.split(".")
        for parent in parents:
            node = node[parent]
        node.__dict__.setdefault(_DUMPED_IF_SET, set()).add(name)


def mark_keys_of_projects(root: CfgNode, keys: CfgNode) -> None:
    """Note the defaults of ``keys``, a part of the config ``root``, for `CfgNode.dump`."""
    for name, default in keys.items():
        if isinstance(default, CfgNode):
            mark_keys_of_projects(root[name], default)
        else:
            root.__dict__.setdefault(_OF_PROJECTS, {})[name] = default


def _without_unset(node: _FvcoreCfgNode, prefix: str, left_out: list[str]) -> dict[str, Any]:
    """A plain copy for a dump; a line for each key that was not set is appended to ``left_out``."""
    plain: dict[str, Any] = {}
    unset = _unset_names(node)
    dumped_if_set = node.__dict__.get(_DUMPED_IF_SET, set())
    defaults_of_projects = node.__dict__.get(_OF_PROJECTS, {})
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, _FvcoreCfgNode):
            below = _without_unset(value, f"{key}.", left_out)
            if below or not value:  # else all of its keys are those of a project
                plain[name] = below
        elif name in unset and name in dumped_if_set:
            left_out.append(f"{key} {value}")
        elif name in defaults_of_projects and value == defaults_of_projects[name]:
            continue
        else:
            plain[name] = value
    return plain


def changed_settings(cfg: CfgNode, default: CfgNode, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(full key, value) of each setting of ``cfg`` that is not so in ``default``."""
    for name, value in cfg.items():
        if isinstance(value, _FvcoreCfgNode):
            yield from changed_settings(value, default.get(name, CfgNode()), f"{prefix}{name}.")
        elif name not in default or value != default[name]:
            yield prefix + name, value


def get_key(cfg: CfgNode, key: str) -> Any:
    """The value of a full key; None if it is not there."""
    value: Any = cfg
    for name in key.split("."):
        if not isinstance(value, _FvcoreCfgNode):
            return None
        value = value.get(name)
    return value


def _merge(
    node: _FvcoreCfgNode, other: Mapping[str, Any], root: _FvcoreCfgNode, prefix: str = ""
) -> None:
    """Merge a mapping into the node of ``root`` whose key is ``prefix`` (it ends with a dot)."""
    for name, value in other.items():
        key = f"{prefix}{name}"
        if name not in node:
            if root.key_is_deprecated(key):  # this logs a warning
                continue
            if root.key_is_renamed(key):
                root.raise_key_rename_error(key)
            if not node.is_new_allowed():
                raise _unknown_key(key, value, root)
        if isinstance(value, Mapping) and node.get(name) is None:
            node[name] = type(root)(new_allowed=True)
        if isinstance(value, Mapping) and isinstance(node[name], _FvcoreCfgNode):
            _merge(node[name], value, root, f"{key}.")
            continue
        old = node.get(name)
        if key in _ANY_TYPE:
            old = None
        node[name] = _coerce(key, value, old)
        _note_merge(node, name, other)


def _unknown_key(key: str, value: Any, root: _FvcoreCfgNode) -> UnknownKeyError:
    # the innermost key shows best which key was meant
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    known = [name for name, _ in changed_settings(root, CfgNode())]
    hint = did_you_mean(key, known).strip()
    return UnknownKeyError(f"unknown key {key}; {hint or 'no key has a similar name'}")


def _note_merge(node: _FvcoreCfgNode, name: str, other: Mapping[str, Any]) -> None:
    """The value of ``name`` is now that of ``other``, and it is set if it is set there."""
    unset = _unset_names(node)
    if isinstance(other, CfgNode) and not other.is_set(name):
        unset.add(name)
    else:
        unset.discard(name)


def _coerce(key: str, value: Any, old: Any) -> Any:
    """A copy of ``value`` with the type of ``old``."""
    if isinstance(old, list | tuple):
        if isinstance(value, str):
            value = parse_literal(value)  # YAML has no tuples: (1, 2) is text there
    elif key in LENGTH_KEYS:
        parse_length(value, key)
        return value
    if value is None and not isinstance(old, list | tuple | Mapping):
        return None
    _check_type(key, value, old)
    value = _as_from_yaml(value)
    if isinstance(old, float | list | tuple):
        return type(old)(value)
    return value


def _check_type(key: str, value: Any, old: Any) -> None:
    for kind, accepted in _ACCEPTED.items():  # bool comes first, since a bool is a number
        if not isinstance(old, kind):
            continue
        is_wrong_bool = isinstance(value, bool) and kind is not bool
        if is_wrong_bool or not isinstance(value, kind):
            raise not_accepted(key, value, accepted)
        return


def _as_from_yaml(value: Any) -> Any:
    """A copy with lists for tuples, so that a dump is read as an equal config."""
    if isinstance(value, Mapping):
        return {name: _as_from_yaml(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_from_yaml(item) for item in value]
    return value
