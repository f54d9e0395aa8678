"""Config files: YAML that cannot run code, with ``_BASE_`` and ``_DELETE_``."""

import ast
import contextlib
import os
import re
from typing import IO, Any

import yaml

from trainkit.utils.errors import ConfigError, not_accepted

BASE_KEY = "_BASE_"  # at the top of a file: the file or files it inherits from
DELETE_KEY = "_DELETE_"  # in a node of a file: ignore the inherited files for this node

_NUMBER = re.compile(r"[-+]?((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+|inf|nan)\Z")


class _Loader(yaml.SafeLoader):
    """Reads only plain values, and refuses a key that is twice in a node (PyYAML uses the last one)."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # here, since a merge ("<<"), resolved later, may repeat keys
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


class Dumper(yaml.SafeDumper):
    """Writes YAML that `load_yaml` reads back as the same values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# YAML 1.1 reads 1e-3 as text, because it has no dot; a text that looks like such a number is written with quotes.
for _class in (_Loader, Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789in"))


def parse_literal(text: str) -> Any:
    """The value of a Python literal, or else of YAML in one line, such as ``[a, b]`` or ``true``."""
    with contextlib.suppress(ValueError, TypeError, SyntaxError):
        return ast.literal_eval(text.strip())
    with contextlib.suppress(yaml.YAMLError, ValueError):
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
        return text if value is None and text != "null" else value  # an empty text and "#fff" stay text
    return text


def load_yaml(stream: str | IO[str], name: str) -> dict[str, Any]:
    """Read one YAML mapping, of the file ``name``. Raises ConfigError if the YAML is invalid or names code."""
    try:
        content = yaml.load(stream, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: text in another encoding, or a date without a day
        raise ConfigError(f"{name}: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise not_accepted(name, content, "a mapping, KEY: VALUE")
    return content or {}


def read_yaml(path: str) -> dict[str, Any]:
    """Read the file ``path``, see `load_yaml`."""
    try:
        with open(path, encoding="utf-8") as file:
            return load_yaml(file, path)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path!r}: {error.strerror}") from error


def read_with_base(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a config file after the files that it inherits from."""
    path = os.path.expanduser(path)
    content, merged = read_yaml(path), dict[str, Any]()
    bases = content.pop(BASE_KEY, [])
    for base in [bases] if isinstance(bases, str) else bases:
        base = os.path.join(os.path.dirname(path), os.path.expanduser(base))
        merged = _overlay(merged, read_with_base(base))
    return _overlay(merged, content)


def _overlay(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Merge the nodes of ``top`` into those of ``base``; a node with ``_DELETE_`` True replaces the old one."""
    merged = {} if top.get(DELETE_KEY) else dict(base)
    for key, value in top.items():
        if isinstance(value, dict):
            below = merged.get(key)
            merged[key] = _overlay(below if isinstance(below, dict) else {}, value)
        elif key != DELETE_KEY:
            merged[key] = value
    return merged
