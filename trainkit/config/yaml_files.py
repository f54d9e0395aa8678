"""Config files: YAML that cannot run code, ``_BASE_`` and ``_DELETE_``."""

import os
import re
from typing import IO, Any

import yaml

from trainkit.config.errors import ConfigError

BASE_KEY = "_BASE_"  # at the top of a file: the file or files it inherits from
DELETE_KEY = "_DELETE_"  # in a node of a file: forget what the inherited files said about this node

_EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")
_EXPONENT_START = list("-+.0123456789")


class _Loader(yaml.SafeLoader):
    """Reads plain values only, and refuses a key that stands twice in a node, which PyYAML lets win silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, because a merge ("<<") repeats keys rightfully and is resolved only later.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value != "<<":
                if key_node.value in seen:
                    problem = f"the key {key_node.value!r} stands twice in one node"
                    raise yaml.composer.ComposerError(None, None, problem, key_node.start_mark)
                seen.add(key_node.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads back as the same value."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# YAML 1.1 takes 1e-3 for text, because it has no dot and no sign; a text of that form is then written with quotes.
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, _EXPONENT_START)


def parse_flow(text: str) -> Any:
    """A list or a node that is written in one line, such as ``[{NAME: EMAHook, DECAY: 0.999}]``; else the text."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def load_yaml(stream: str | IO[str], name: str) -> dict[str, Any]:
    """Read one YAML mapping; an empty document is ``{}``.

    Args:
        name: what errors call the text, such as its file name.

    Raises:
        ConfigError: invalid YAML (with its line), a tag that names code, or a top level that is no mapping.
    """
    try:
        content = yaml.load(stream, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}, line {mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or str(error)
        if "!!python" in problem or "tag:yaml.org,2002:python" in problem:
            problem += "; a config is read safely and names code in IMPORTS only"
        raise ConfigError(f"{place}: {problem}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: this is no UTF-8 text: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{name}: a config is a mapping of keys to values, got {type(content).__name__}; write KEY: VALUE"
        )
    _check_tree(content, name, "", [])
    return content


def dump_yaml(content: dict[str, Any], **kwargs: Any) -> str:
    """Write ``content`` so that ``load_yaml`` gives it back; ``kwargs`` are those of ``yaml.dump``."""
    return yaml.dump(content, Dumper=_Dumper, **kwargs)


def read_layers(filename: str | os.PathLike[str]) -> list[tuple[str, dict[str, Any]]]:
    """Read a config file and all it inherits from.

    Returns:
        (path, content) of each file, inherited ones first, without ``_BASE_``; ``overlay`` puts them together.

    Raises:
        ConfigError: a file is missing, cannot be read as YAML, or inherits from itself.
    """
    return _read_layers(os.path.expanduser(filename), [])


def overlay(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Merge the nodes of ``top`` into those of ``base``, or replace them where ``_DELETE_`` is True."""
    merged = {} if top.get(DELETE_KEY) else dict(base)
    for key, value in top.items():
        if isinstance(value, dict):
            below = merged.get(key)
            merged[key] = overlay(below if isinstance(below, dict) else {}, value)
        elif key != DELETE_KEY:
            merged[key] = value
    return merged


def _read_layers(path: str, chain: list[str]) -> list[tuple[str, dict[str, Any]]]:
    real = os.path.realpath(path)
    if real in map(os.path.realpath, chain):
        raise ConfigError(f"{BASE_KEY} goes in a circle; leave out one of these: {' -> '.join([*chain, path])}")
    try:
        with open(path, encoding="utf-8") as file:
            content = load_yaml(file, path)
    except OSError as error:
        wanted_by = f" ({BASE_KEY} of {chain[-1]})" if chain else ""
        raise ConfigError(f"cannot read the config file {path!r}{wanted_by}: {error.strerror}") from error
    layers = []
    for base in _bases(content.pop(BASE_KEY, []), path):
        layers += _read_layers(os.path.join(os.path.dirname(path), os.path.expanduser(base)), [*chain, path])
    return [*layers, (path, content)]


def _bases(value: object, path: str) -> list[str]:
    bases = value if isinstance(value, list) else [value]
    paths = [base for base in bases if isinstance(base, str) and base]
    if len(paths) < len(bases):
        raise ConfigError(f"{path}: {BASE_KEY} must be a path or a list of paths, got {value!r}")
    return paths


def _check_tree(value: Any, name: str, prefix: str, ancestors: list[int]) -> None:
    """Refuse a tree that is endless, and a mark that means nothing."""
    if not isinstance(value, dict | list):
        return
    if id(value) in ancestors:
        raise ConfigError(f"{name}: {prefix.rstrip('.')} contains itself by an alias; write its content instead")
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if key == DELETE_KEY and not isinstance(item, bool):
            raise ConfigError(f"{name}: {prefix}{key} must be True or False, got {item!r}")
        _check_tree(item, name, f"{prefix}{key}.", [*ancestors, id(value)])
