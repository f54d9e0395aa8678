"""Find the lines of a model that make the host wait for the device."""

import os
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainkit.utils import comm

_READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}
_LIBRARIES = ("<", __file__, f"{Path(torch.__file__).parent}{os.sep}", f"{Path(comm.__file__).parents[1]}{os.sep}")


class HostReads(TorchDispatchMode):
    """Context that adds to ``lines`` the place of each read of a tensor, and of each copy from or to the host.

    A place is the innermost line that is not in torch or trainkit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        devices = {leaf.device.type for leaf in tree_leaves((args, results)) if isinstance(leaf, Tensor)}
        if name in _READS or (name in ("copy_", "_to_copy") and len(devices) > 1):
            stack = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_LIBRARIES)]
            self.lines += [f"{name} at {frame.filename}:{frame.lineno}" for frame in stack[-1:]]
        return results
