"""CfgNode: fvcore's config node with strict merging and errors that give the full key."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from fvcore.common.config import CfgNode as _FvcoreCfgNode

from trainkit.config.errors import ConfigError
from trainkit.config.merge import OptionText, changes, merge_node, plain_value, untyped_keys
from trainkit.config.yaml_files import dump_yaml, load_yaml, overlay, read_layers


class CfgNode(_FvcoreCfgNode):
    """A node of a config: keys with values or further nodes, as attributes and as items.

    Merging checks each value against the old one, and changes all values or none. A bool takes a bool, an int takes an
    int, a float also an int, a list or a tuple either (and keeps its type), a key of ``LENGTH_KEYS`` also epochs. A key
    with the default None takes anything; so does a key that merging has added to a node with ``new_allowed``.
    """

    def __setattr__(self, name: str, val: Any) -> None:
        was_none = name in self and self[name] is None
        super().__setattr__(name, val)
        if was_none:
            untyped_keys(self).add(name)

    @classmethod
    def load_yaml_with_base(cls, filename: str | os.PathLike[str], allow_unsafe: bool = False) -> dict[str, Any]:
        """Read a file after the files that it inherits from by ``_BASE_`` (a path or a list, relative to the file).

        ``_DELETE_: True`` in a node removes the settings of this node from the inherited files.

        Raises:
            ConfigError: see ``merge_from_file``.
        """
        _refuse_unsafe(allow_unsafe)
        content: dict[str, Any] = {}
        for _, layer in read_layers(filename):
            content = overlay(content, layer)
        return content

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
        _refuse_unsafe(allow_unsafe)
        content: dict[str, Any] = {}
        layers = read_layers(cfg_filename)
        for path, layer in layers:
            is_top = layer is layers[-1][1]
            if not is_top and layer and not self.is_new_allowed() and not self.keys() & layer.keys():
                # do not show its keys: a foreign config can name any file of this machine
                raise ConfigError(f"{path}, named by _BASE_, is no config of this program; none of its keys is known")
            content = overlay(content, layer)
            try:
                if is_top:
                    self.merge_from_other_cfg(content)
                else:  # check it alone, so that the error is about this file
                    list(changes(self, overlay({}, layer), self))
            except ConfigError as error:
                raise type(error)(f"{path}: {error}") from None

    def merge_from_other_cfg(self, cfg_other: Mapping[str, Any]) -> None:
        """Merge another config or a nested dict. Raises ConfigError if a key or value is wrong."""
        if self.is_frozen():
            raise ConfigError("the config is frozen; call defrost() before merging")
        merge_node(self, cfg_other, self)

    def merge_from_list(self, cfg_list: Sequence[Any]) -> None:
        """Merge ``[KEY, VALUE, KEY, VALUE, ...]``, such as the last options of a command line.

        A VALUE of type str is read as a Python literal. It stays text if it is not a literal, or if its key takes text.

        Raises:
            ConfigError: the items are not in pairs, or a key or value is wrong.
        """
        layers = []
        for full_key, value in _pairs(cfg_list):
            if self.key_is_deprecated(full_key):  # this logs it
                continue
            layer: Any = OptionText(value) if isinstance(value, str) else value
            for name in reversed(full_key.split(".")):
                layer = {name: layer}
            list(changes(self, layer, self))  # all of them before the first change
            layers.append(layer)
        for layer in layers:
            self.merge_from_other_cfg(layer)

    def dump(self, **kwargs: Any) -> str:
        """The config as YAML that ``merge_from_file`` reads back; ``kwargs`` are those of ``yaml.dump``."""
        return dump_yaml({name: plain_value(name, value) for name, value in self.items()}, **kwargs)


def _refuse_unsafe(allow_unsafe: bool) -> None:
    if allow_unsafe:
        raise ConfigError("allow_unsafe=True: YAML that runs code is never read; name modules in IMPORTS instead")


def _pairs(items: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for item in items[::2]:
        if isinstance(item, str) and "=" in item:
            key, _, value = item.partition("=")
            raise ConfigError(f"options are written KEY VALUE, got {item!r}; write {key} {value}")
    if len(items) % 2:
        raise ConfigError(
            f"options are written KEY VALUE KEY VALUE ..., got an odd number of items ({len(items)}): {list(items)}; "
            "give each key one value"
        )
    for full_key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(full_key, str) or "" in full_key.split("."):
            raise ConfigError(f"{full_key!r} is no key; write names joined by dots, such as SOLVER.BASE_LR")
        yield full_key, value
