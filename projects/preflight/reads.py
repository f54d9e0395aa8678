"""Which keys of a config are read."""

from collections.abc import Iterator
from typing import Any

from trainkit.config import CfgNode

reads: dict[str, None] = {}  # full keys that were read since `record_reads`


class _Recorded(CfgNode):
    """Notes the keys that are read; the key of the node itself is in its __dict__."""

    def __getattr__(self, name: str) -> Any:
        reads[self.__dict__.get("__key__", "") + name] = None
        return super().__getattr__(name)

    def get(self, name: str, default: Any = None) -> Any:
        reads[self.__dict__.get("__key__", "") + name] = None
        return super().get(name, default)

    def __iter__(self) -> Iterator[Any]:
        """All keys are read, also by ``**node``."""
        reads.update({self.__dict__.get("__key__", "") + name: None for name in self.keys()})
        return super().__iter__()


def record_reads(node: CfgNode, key: str = "") -> None:
    """Let a config and its copies note which keys are read."""
    for name, value in node.items():
        if isinstance(value, CfgNode):
            record_reads(value, f"{key}{name}.")
    object.__setattr__(node, "__class__", _Recorded)  # the node may be frozen
    node.__dict__["__key__"] = key
