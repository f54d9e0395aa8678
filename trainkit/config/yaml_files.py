"""Config files: YAML that cannot run code, with ``_BASE_`` and ``_DELETE_``."""

import ast
import contextlib
import os
import re
from typing import IO, Any

import yaml

from trainkit.utils.errors import ConfigError, not_accepted
from trainkit.utils.file_io import refuse_pipe
from trainkit.utils.periods import Period, round_length

_NUMBER = re.compile(r"[-+]?((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+|inf|nan)\Z")


class _Loader(yaml.SafeLoader):
    """Reads only plain values, and refuses a key that is twice in a node.

    PyYAML would use the last one.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # here, since a merge ("<<"), resolved later, may repeat keys
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in names and name != "<<":
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name!r} is twice", problem_mark=key.start_mark
                )
            names.add(name)
        return node


class Dumper(yaml.SafeDumper):
    """Writes YAML that `load_yaml` reads back as the same values."""

    def represent_data(self, data: Any) -> yaml.Node:
        if isinstance(data, dict):
            data = dict(data)  # a node
        elif isinstance(data, Period):
            data = round_length(data)
        elif isinstance(data, int) and not isinstance(data, bool):
            data = int(data)  # an IntEnum
        return super().represent_data(data)


# YAML 1.1 reads 1e-3 as text, because it has no dot; a text that looks like such a number is
# written with quotes.
for _class in (_Loader, Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789in"))
    # as on the command line and in detectron2; the text 'None' is written with quotes
    _class.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"None\Z"), ["N"])


def parse_literal(text: str) -> Any:
    """The value of a Python literal, or else of YAML in one line, such as ``[a, b]``, ``true``."""
    with contextlib.suppress(ValueError, TypeError, SyntaxError):
        return ast.literal_eval(text.strip())
    with contextlib.suppress(yaml.YAMLError, ValueError):
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
        if value is None and text != "null":
            return text  # it is empty or a comment, such as "#fff"
        return value
    return text


def load_yaml(stream: str | IO[str], name: str) -> dict[str, Any]:
    """Read one YAML mapping, of the file ``name``.

    Raises:
        ConfigError: the YAML is invalid or names code.
    """
    try:
        content = yaml.load(stream, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        # a ValueError: text in another encoding, or a date without a day
        raise ConfigError(f"{name}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise not_accepted(name, content, "a mapping, KEY: VALUE")
    return content


def read_yaml(path: str) -> dict[str, Any]:
    """Read the file ``path``, see `load_yaml`."""
    try:
        refuse_pipe(path)
        with open(path, encoding="utf-8") as file:
            return load_yaml(file, path)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot read the config file {path!r}: {reason}") from error


def read_with_base(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a config file after the files that it inherits from, which its key ``_BASE_`` names.

    Raises ConfigError, also if a file inherits from itself, directly or through others.
    """
    return _read_after_bases(os.path.expanduser(path), [])


def _read_after_bases(path: str, inherited_by: list[str]) -> dict[str, Any]:
    """As `read_with_base`.

    Args:
        inherited_by: the files that are being read, since each names the next one as its base.
    """
    # compared without links, so that a file with two names is found too
    real_paths = [os.path.realpath(other) for other in inherited_by]
    if os.path.realpath(path) in real_paths:
        start = real_paths.index(os.path.realpath(path))
        loop = " -> ".join([*inherited_by[start:], path])
        raise ConfigError(f"_BASE_: a config file inherits from itself: {loop}; remove one of them")
    content = read_yaml(path)
    bases = content.pop("_BASE_", [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise not_accepted(f"{path}: _BASE_", bases, "a path, or a list of paths")
    merged: dict[str, Any] = {}
    for base in bases:
        base_path = os.path.join(os.path.dirname(path), os.path.expanduser(base))
        merged = _overlay(merged, _read_after_bases(base_path, [*inherited_by, path]))
    return _overlay(merged, content)


def _overlay(base: Any, top: dict[str, Any]) -> dict[str, Any]:
    """Merge the nodes of ``top`` into those of ``base``.

    A node with ``_DELETE_: True`` replaces the old one.
    """
    merged: dict[str, Any] = {}
    if isinstance(base, dict) and not top.get("_DELETE_"):
        merged.update(base)
    for key, value in top.items():
        if key == "_DELETE_":
            continue
        if isinstance(value, dict):
            value = _overlay(merged.get(key), value)
        merged[key] = value
    return merged
