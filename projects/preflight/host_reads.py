"""Find the line of a model that makes the host wait for the device."""

import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainkit.utils import comm

_READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}


class HostReads(TorchDispatchMode):
    """Context that notes the first operation that a CUDA graph cannot record: a read, or a copy from or to the host.

    Attributes:
        found: the operation and its line; None if there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if self.found is None:
            name = func._schema.name.removeprefix("aten::")
            devices = {leaf.device.type for leaf in tree_leaves((args, results)) if isinstance(leaf, Tensor)}
            if name in _READS or (name in ("copy_", "_to_copy") and len(devices) > 1):
                self.found = f"{name} at {_place()}"
        return results


def _place() -> str:
    """The innermost line that is not in torch or trainkit."""
    folders = [f"{Path(torch.__file__).parent}{os.sep}", f"{Path(comm.__file__).parents[1]}{os.sep}"]
    libraries = ("<", *folders, __file__)
    inner = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(libraries)]
    return f"{inner[-1].filename}:{inner[-1].lineno}" if inner else "a place without a line of Python (a backward pass)"
