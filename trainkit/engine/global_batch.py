"""The batch of an iteration, saved for starts with another number of ranks."""

import json
import logging
from pathlib import Path
from typing import Any

from trainkit.checkpoint.atomic import write_text
from trainkit.config import CfgNode
from trainkit.config.scaling import split_batch
from trainkit.utils import comm

logger = logging.getLogger(__name__)

_FILE = "batch.json"


class GlobalBatch:
    """How a run divides the samples of an iteration over ranks, saved in a file beside its checkpoints.

    Args:
        cfg: the config as the user gave it.
        folder: the folder of the checkpoints.

    Attributes:
        record: the content of the file, as plain values.
    """

    def __init__(self, cfg: CfgNode, folder: str) -> None:
        self._path = Path(folder) / _FILE
        solver = cfg.SOLVER
        asked = [solver.IMS_PER_BATCH, solver.ACCUMULATION_STEPS, solver.REFERENCE_WORLD_SIZE]
        self._ranks = comm.get_data_world_size()
        self.record: dict[str, Any] = {"world_size": self._ranks, "asked": asked}
        former = self._read(self._path) if comm.is_main_process() else None
        former = comm.broadcast(former)
        if former is not None and former["asked"] == asked:  # otherwise it was set for this number of ranks
            self.record = former

    @property
    def world_size(self) -> int:
        """The number of ranks at the first start with this batch size; the config is meant for this number."""
        return int(self.record["world_size"])

    def split(self, cfg: CfgNode) -> CfgNode:
        """Call `split_batch` for the current number of ranks."""
        return split_batch(cfg, self.world_size, self._ranks)

    def save(self) -> None:
        """Write the file, on rank 0."""
        try:
            if comm.is_main_process():
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_text(json.dumps(self.record), self._path)
        except OSError as error:  # a CheckpointError is an OSError
            logger.warning("A start with another number of processes cannot keep the batch of this run: %s", error)

    def _read(self, path: Path) -> dict[str, Any] | None:
        if not path.exists() or not any(path.parent.glob("*.pth")):
            return None  # without a checkpoint the file may be of another job
        try:
            record = json.loads(path.read_text())
            record = {"world_size": int(record["world_size"]), "asked": list(record["asked"])}
            if record["world_size"] < 1:
                raise ValueError(f"world_size must be 1 or more, got {record['world_size']}")
            return record
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            logger.warning("'%s' is damaged and is ignored: %s", path, error)
            return None
