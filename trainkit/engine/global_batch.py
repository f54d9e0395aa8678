"""The batch of an iteration, saved for starts with another number of ranks."""

import json
import logging
from pathlib import Path
from typing import Any

from trainkit.checkpoint.atomic import write_text
from trainkit.config import CfgNode
from trainkit.config.errors import not_accepted
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
        """The config for the current number of ranks; see `split_batch`."""
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


def split_batch(cfg: CfgNode, num_workers: int, present: int) -> CfgNode:
    """Divide the batch of an iteration, made for ``num_workers`` ranks, over ``present`` ranks.

    Each rank keeps its samples per forward pass, and ACCUMULATION_STEPS changes, so that IMS_PER_BATCH *
    ACCUMULATION_STEPS, learning rates and lengths stay. If the ranks cannot be given equal parts, IMS_PER_BATCH and
    ACCUMULATION_STEPS change, but not their product.

    Returns:
        ``cfg`` itself if nothing changes, else a changed copy.

    Raises:
        ConfigError: ``present`` ranks cannot share the batch.
    """
    solver = cfg.SOLVER
    samples = solver.IMS_PER_BATCH * solver.ACCUMULATION_STEPS
    if num_workers == present or solver.IMS_PER_BATCH % num_workers:
        return cfg
    batch_size = solver.IMS_PER_BATCH // num_workers * present
    if samples % batch_size:
        batch_size = next((size for size in (solver.IMS_PER_BATCH, samples) if size % present == 0), 0)
        if not batch_size:
            fitting = ", ".join(str(number) for number in range(1, samples + 1) if samples % number == 0)
            accepted = f"{fitting}, which can share {samples} samples per iteration"
            raise not_accepted("number of processes", present, accepted)
    logger.warning(
        "This run started with %d processes, now there are %d: SOLVER.IMS_PER_BATCH is %d and ACCUMULATION_STEPS %d "
        "instead of %d and %d, which keeps the %d samples per iteration",
        *(num_workers, present, batch_size, samples // batch_size),
        *(solver.IMS_PER_BATCH, solver.ACCUMULATION_STEPS, samples),
    )
    if batch_size == solver.IMS_PER_BATCH:
        return cfg
    cfg = cfg.clone()
    cfg.SOLVER.update(IMS_PER_BATCH=batch_size, ACCUMULATION_STEPS=samples // batch_size)
    return cfg
