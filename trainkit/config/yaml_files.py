"""Config files: YAML that cannot run code, with ``_BASE_`` and ``_DELETE_``."""

import ast
import os
import re
from typing import IO, Any

import yaml

from trainkit.config.errors import ConfigError

BASE_KEY = "_BASE_"  # at the top of a file: the file or files it inherits from
DELETE_KEY = "_DELETE_"  # in a node of a file: ignore the inherited files for this node

_EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")
_WORDS = {"true": True, "false": False, "null": None}


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
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def parse_literal(text: str) -> Any:
    """A Python literal, a list or node in YAML, YAML's true, false and null, or else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError):
        try:
            return yaml.load(text, Loader=_Loader) if text.lstrip().startswith(("[", "{")) else text
        except yaml.YAMLError:
            return text


def load_yaml(stream: str | IO[str], name: str) -> dict[str, Any]:
    """Read one YAML mapping; an empty document is ``{}``.

    Args:
        name: the name in errors, such as the file.

    Raises:
        ConfigError: invalid YAML (with its line), a tag that names code, or a top level that is not a mapping.
    """
    try:
        content = yaml.load(stream, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: text in another encoding, or a date without a day
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        line = f", line {mark.line + 1}" if mark else ""
        code = "; YAML runs no code here: write the value, or name a module in IMPORTS" if "python/" in problem else ""
        raise ConfigError(f"{name}{line}: {problem}{code}") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{name}: got {type(content).__name__}; accepted: a mapping, KEY: VALUE")
    return content or {}


def read_yaml(path: str, wanted_by: str = "") -> dict[str, Any]:
    """Read the file ``path``, see `load_yaml`; errors mention ``wanted_by``, the file that names it."""
    try:
        with open(path, encoding="utf-8") as file:
            return load_yaml(file, path)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path!r}{wanted_by}: {error.strerror}") from error


def read_layers(filename: str | os.PathLike[str], chain: tuple[str, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Read a config file and all files that it inherits from.

    Args:
        chain: the files that inherit from it.

    Returns:
        (path, content) of each file, inherited ones first, without ``_BASE_``; `overlay` merges them.

    Raises:
        ConfigError: a file is missing, is not YAML, or inherits from itself.
    """
    path = os.path.expanduser(filename)
    if os.path.realpath(path) in map(os.path.realpath, chain):
        raise ConfigError(f"{BASE_KEY} goes in a circle; leave out one of these: {' -> '.join([*chain, path])}")
    content = read_yaml(path, f" ({BASE_KEY} of {chain[-1]})" if chain else "")
    value = content.pop(BASE_KEY, [])
    bases = value if isinstance(value, list) else [value]
    if not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: {BASE_KEY}: got {value!r}; accepted: a path, or a list of paths")
    paths = [os.path.join(os.path.dirname(path), os.path.expanduser(base)) for base in bases]
    return [layer for base in paths for layer in read_layers(base, (*chain, path))] + [(path, content)]


def overlay(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Merge the nodes of ``top`` into those of ``base``; a node with ``_DELETE_`` True replaces the old one."""
    merged = {} if top.get(DELETE_KEY) else dict(base)
    for key, value in top.items():
        if isinstance(value, dict):
            below = merged.get(key)
            merged[key] = overlay(below if isinstance(below, dict) else {}, value)
        elif key != DELETE_KEY:
            merged[key] = value
    return merged
