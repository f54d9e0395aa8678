"""What held the memory when a device had no more."""

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks.registry import HOOK_REGISTRY
from trainkit.utils import comm
from trainkit.utils.numbers import is_whole

logger = logging.getLogger(__name__)

_MIB = 2**20
_NUM_TENSORS = 10  # that are named, the largest ones


@HOOK_REGISTRY.register()
class MemorySnapshot(HookBase):
    """If CUDA runs out of memory, log whose tensors are the largest, and write torch's history of its memory to a file.

    The file is for https://docs.pytorch.org/memory_viz. For it torch notes each allocation with its stack, which takes
    a few microseconds each. Does nothing without CUDA.

    Args:
        output_dir: where ``memory_<iteration>_rank<rank>.pickle`` is written; default is that of the checkpoints.
        max_entries: how many of the newest allocations are noted.
    """

    def __init__(self, output_dir: str = "", max_entries: int = 100_000) -> None:
        if not is_whole(max_entries, 1):
            raise ValueError(f"max_entries must be a whole number >= 1, got {max_entries!r}")
        self._output_dir, self._max_entries = output_dir, max_entries

    def before_train(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=self._max_entries)

    def after_train(self) -> None:
        if not torch.cuda.is_available():
            return
        if isinstance(sys.exc_info()[1], torch.OutOfMemoryError):
            logger.error("Out of memory in iteration %d, so the run ends. %s", self.trainer.iter, self._describe())
            folder = self._output_dir or getattr(getattr(self.trainer, "checkpointer", None), "save_dir", "") or "."
            file = Path(folder, f"memory_{self.trainer.iter}_rank{comm.get_rank()}.pickle")
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(file))
            logger.error("The history of the memory is in %s, for https://docs.pytorch.org/memory_viz", file)
        torch.cuda.memory._record_memory_history(enabled=None)

    def _describe(self) -> str:
        sizes: dict[str, tuple[str, int]] = {}  # name -> (owner, bytes), each block of memory once
        seen = set()
        for owner, name, tensor in self._tensors():
            storage = tensor.untyped_storage()
            if tensor.is_cuda and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[f"{owner} {name}"] = owner, storage.nbytes()
        sums: Counter[str] = Counter()
        for owner, size in sizes.values():
            sums[owner] += size
        sums["activations and the rest"] = torch.accelerator.memory.memory_allocated() - sum(sums.values())
        largest = sorted(sizes.items(), key=lambda item: -item[1][1])[:_NUM_TENSORS]
        return (
            f"In MiB: {', '.join(f'{owner} {size / _MIB:.0f}' for owner, size in sums.most_common())}. The largest "
            f"tensors: {', '.join(f'{name} {size / _MIB:.0f}' for name, (_, size) in largest) or 'none'}"
        )

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        model, names = self.trainer.model, {}
        for name, parameter in model.named_parameters():
            names[parameter] = name
            yield "parameter", name, parameter
        yield from (("gradient", name, param.grad) for param, name in names.items() if param.grad is not None)
        yield from (("buffer", name, buffer) for name, buffer in model.named_buffers())
        for parameter, state in getattr(self.trainer.optimizer, "state", {}).items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield "optimizer state", f"{names.get(parameter, '?')}.{key}", value
        yield from (("batch", str(i), leaf) for i, leaf in enumerate(_leaves(self.trainer)) if isinstance(leaf, Tensor))


def _leaves(trainer: Any) -> list[Any]:
    try:
        return tree_leaves(trainer.batch)
    except RuntimeError:  # below the save point there is none
        return []
