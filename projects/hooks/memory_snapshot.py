"""A record of the memory when a device runs out of it."""

import logging
from pathlib import Path

import torch

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils import comm
from trainkit.utils.periods import is_whole

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class MemorySnapshot(HookBase):
    """If CUDA runs out of memory, write torch's history of allocations to a file.

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

    def after_failure(self, error: BaseException) -> None:
        if torch.cuda.is_available() and isinstance(error, torch.OutOfMemoryError):
            folder = self._output_dir or getattr(getattr(self.trainer, "checkpointer", None), "save_dir", "") or "."
            file = Path(folder, f"memory_{self.trainer.iter}_rank{comm.get_rank()}.pickle")
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(file))
            logger.error("The history of the memory is in %s, for https://docs.pytorch.org/memory_viz", file)

    def after_train(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(enabled=None)
