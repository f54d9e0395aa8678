"""Config files: YAML that cannot run code, with ``_BASE_`` and ``_DELETE_``."""

import ast
import contextlib
import os
import re
from typing import IO, Any

import yaml

from trainkit.config.arithmetic import evaluate_arithmetic
from trainkit.config.errors import ConfigError

BASE_KEY = "_BASE_"  # at the top of a file: the file or files it inherits from
DELETE_KEY = "_DELETE_"  # in a node of a file: ignore the inherited files for this node

# No real config reaches these limits; with aliases, a few lines can stand for billions of values.
_MAX_VALUES = 50_000  # in a file, with aliases expanded
_MAX_DEPTH = 100
_MAX_DIGITS = 100
_MAX_FILES = 100  # files that a file inherits from; each mention of a file counts

_EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")
_EXPONENT_START = list("-+.0123456789")
_WORDS = {"true": True, "false": False, "null": None}


class _Loader(yaml.SafeLoader):
    """Reads only plain values, within limits, and refuses a key that is twice in a node (PyYAML uses the last one)."""

    _depth = 0  # the depth of the current node

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        if self._depth >= _MAX_DEPTH:
            raise _too_deep(self.peek_event().start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_data(self) -> Any:
        root = self.get_single_node()
        num_values, pending = 1, [(root, 1)] if root is not None else []
        while pending:  # with aliases expanded
            node, depth = pending.pop()
            if depth > _MAX_DEPTH:
                raise _too_deep(node.start_mark)
            if isinstance(node, yaml.CollectionNode):
                pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
                num_values += sum(map(len, pairs))
                if num_values > _MAX_VALUES:
                    text = f"this expands to more than {_MAX_VALUES:,} values; write fewer aliases"
                    raise _error(text, root.start_mark)
                pending += [(item, depth + 1) for pair in pairs for item in pair]
        return None if root is None else self.construct_document(root)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Check now: a merge ("<<"), which is resolved later, may repeat keys.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value != "<<":
                if key_node.value in seen:
                    raise _error(f"the key {key_node.value!r} is twice in one node", key_node.start_mark)
                seen.add(key_node.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag.endswith((":int", ":float")) and len(node.value) > _MAX_DIGITS:
            raise _error(f"a number has at most {_MAX_DIGITS} digits, got {len(node.value)}", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = node.tag.rpartition(":")[2]
            raise _error(f"this cannot be read as {kind!r}; write text in quotes", node.start_mark) from error


def _too_deep(mark: Any) -> yaml.MarkedYAMLError:
    return _error(f"nodes and lists are more than {_MAX_DEPTH} deep, or contain themselves; write them less deep", mark)


def _error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


class Dumper(yaml.SafeDumper):
    """Writes YAML that ``_Loader`` reads back as the same values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_arithmetic(loader: _Loader, node: yaml.Node) -> Any:
    """Read ``!!python/object/apply:eval ["2 ** 0.5"]``, as in detectron2 configs, without running code."""
    texts = loader.construct_sequence(node) if isinstance(node, yaml.SequenceNode) else []
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise _error('eval takes one text in a list, such as ["2 * 3"]; write it so', node.start_mark)
    try:
        return evaluate_arithmetic(texts[0])
    except ValueError as error:
        raise _error(str(error), node.start_mark) from error


_Loader.add_constructor("tag:yaml.org,2002:python/object/apply:eval", _construct_arithmetic)

# YAML 1.1 reads 1e-3 as text, because it has no dot; a text that looks like such a number is written with quotes.
for _class in (_Loader, Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, _EXPONENT_START)


def parse_literal(text: str) -> Any:
    """A Python literal, a list or node in YAML, YAML's true, false and null, or else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text.strip())
        str(value)  # raises for an int with thousands of digits, such as 0xfff..., which Python cannot write
        return value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        with contextlib.suppress(yaml.YAMLError):
            return yaml.load(text, Loader=_Loader) if text.lstrip().startswith(("[", "{")) else text
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
    _check_marks(content, name, "")
    return content


def read_yaml(path: str, wanted_by: str = "") -> dict[str, Any]:
    """Read the file ``path``, see `load_yaml`; errors mention ``wanted_by``, the file that names it."""
    try:
        with open(path, encoding="utf-8") as file:
            return load_yaml(file, path)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path!r}{wanted_by}: {error.strerror}") from error


def dump_yaml(content: dict[str, Any], **kwargs: Any) -> str:
    """Write ``content`` so that ``load_yaml`` reads it back; ``kwargs`` are those of ``yaml.dump``."""
    return yaml.dump(content, Dumper=Dumper, **kwargs)


def read_layers(filename: str | os.PathLike[str]) -> list[tuple[str, dict[str, Any]]]:
    """Read a config file and all files that it inherits from.

    Returns:
        (path, content) of each file, inherited ones first, without ``_BASE_``; ``overlay`` merges them.

    Raises:
        ConfigError: a file is missing, is not YAML, or inherits from itself.
    """
    layers: list[tuple[str, dict[str, Any]]] = []
    _read_layers(os.path.expanduser(filename), [], layers)
    return layers


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


def _read_layers(path: str, chain: list[str], layers: list[tuple[str, dict[str, Any]]]) -> None:
    """Add a file to ``layers``, after the files that it inherits from; ``chain``: the files that inherit from it."""
    real = os.path.realpath(path)
    if real in map(os.path.realpath, chain):
        raise ConfigError(f"{BASE_KEY} goes in a circle; leave out one of these: {' -> '.join([*chain, path])}")
    if len(chain) + len(layers) > _MAX_FILES:
        raise ConfigError(f"{chain[0]} inherits from more than {_MAX_FILES} files by {BASE_KEY}; name each once")
    content = read_yaml(path, f" ({BASE_KEY} of {chain[-1]})" if chain else "")
    for base in _bases(content.pop(BASE_KEY, []), path):
        _read_layers(os.path.join(os.path.dirname(path), os.path.expanduser(base)), [*chain, path], layers)
    layers.append((path, content))


def _bases(value: object, path: str) -> list[str]:
    bases = value if isinstance(value, list) else [value]
    paths = [base for base in bases if isinstance(base, str) and base and base.isprintable()]
    if len(paths) < len(bases):
        raise ConfigError(f"{path}: {BASE_KEY} must be a path or a list of paths, got {value!r:.80}")
    return paths


def _check_marks(value: Any, name: str, prefix: str) -> None:
    """Raise ConfigError for a ``_DELETE_`` whose value is not a bool."""
    if not isinstance(value, dict | list):
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if key == DELETE_KEY and not isinstance(item, bool):
            raise ConfigError(f"{name}: {prefix}{key} must be True or False, got {item!r:.80}")
        _check_marks(item, name, f"{prefix}{key}.")
