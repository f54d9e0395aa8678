"""The samples of an iteration stay the same when a run continues with another number of ranks."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from trainkit.projects.scaling.scaling import scale_workers

from trainkit.checkpoint.atomic import write_text
from trainkit.config import CfgNode
from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.utils import comm
from trainkit.utils.errors import not_accepted

logger = logging.getLogger(__name__)

FILE = "batch.json"


def keep_batch(cfg: CfgNode) -> None:
    """Change ``cfg`` to the batch and the lengths with which its run was started, divided over the present ranks.

    `KeepBatch` notes how many ranks there were. A note for another batch size is ignored. Every rank calls this.
    """
    solver, present = cfg.SOLVER, comm.get_data_world_size()
    asked = [solver.IMS_PER_BATCH, solver.ACCUMULATION_STEPS, solver.REFERENCE_WORLD_SIZE]
    path = Path(cfg.CHECKPOINT.DIR or cfg.OUTPUT_DIR, FILE)
    note = comm.broadcast(json.loads(path.read_text()) if comm.is_main_process() and path.exists() else {})
    first = note["world_size"] if note.get("asked") == asked else present
    if first != present:
        cfg.update(split_batch(scale_workers(cfg, first), first, present))
        cfg.SOLVER.REFERENCE_WORLD_SIZE = present  # so that nothing is scaled again
    cfg.HOOKS = [*cfg.HOOKS, {"NAME": "KeepBatch", "WORLD_SIZE": first, "ASKED": asked}]


@HOOK_REGISTRY.register()
class KeepBatch(HookBase):
    """Notes beside the checkpoints for how many ranks the config of the run is."""

    def __init__(self, world_size: int, asked: Sequence[int]) -> None:
        self._note = {"world_size": world_size, "asked": [*asked]}

    def before_train(self) -> None:
        if comm.is_main_process():
            folder = Path(self.trainer.checkpointer.save_dir)
            folder.mkdir(parents=True, exist_ok=True)
            write_text(json.dumps(self._note), folder / FILE)


def split_batch(cfg: CfgNode, num_workers: int, present: int) -> CfgNode:
    """Divide the batch of an iteration, made for ``num_workers`` ranks, over ``present`` ranks.

    Each rank keeps its samples per forward pass if the numbers divide evenly, and ACCUMULATION_STEPS changes, so that
    IMS_PER_BATCH * ACCUMULATION_STEPS, learning rates and lengths stay.

    Returns:
        A changed copy.

    Raises:
        ConfigError: ``present`` ranks cannot share the batch.
    """
    batch_size, samples = cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATION_STEPS
    sizes = (batch_size // num_workers * present, batch_size, samples)
    size = next((size for size in sizes if size and samples % size == 0 and size % present == 0), 0)
    if not size:
        fitting = ", ".join(str(number) for number in range(1, samples + 1) if samples % number == 0)
        accepted = f"{fitting}, which can share {samples} samples per iteration"
        raise not_accepted("number of processes", present, accepted)
    text = "This run started with %d processes, now there are %d: SOLVER.IMS_PER_BATCH %d, ACCUMULATION_STEPS %d"
    logger.info(text, num_workers, present, size, samples // size)
    cfg = cfg.clone()
    cfg.SOLVER.update(IMS_PER_BATCH=size, ACCUMULATION_STEPS=samples // size)
    return cfg
