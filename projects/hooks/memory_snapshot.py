"""A record of the memory when a device runs out of it."""

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils import comm
from trainkit.utils.numbers import is_whole

logger = logging.getLogger(__name__)

_MIB = 2**20
_NUM_TENSORS = 10  # the largest ones are named


@HOOK_REGISTRY.register()
class MemorySnapshot(HookBase):
    """If CUDA runs out of memory, log the largest tensors and write torch's history of allocations to a file.

    View the file at https://docs.pytorch.org/memory_viz. Recording takes a few microseconds per allocation. Does
    nothing without CUDA.

    Args:
        output_dir: folder of ``memory_<iteration>_rank<rank>.pickle``; default is the folder of the checkpoints.
        max_entries: number of newest allocations that are kept.
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
        sizes: dict[str, tuple[str, int]] = {}  # name -> (owner, bytes); each memory block counts once
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
        with contextlib.suppress(RuntimeError):  # the batch is not available below the save point
            leaves = tree_leaves(self.trainer.batch)
            yield from (("batch", str(i), leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
