"""A job that runs for some steps and leaves nothing behind."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainkit.config import CfgNode, import_modules
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.utils.env import seed_all_rng


@contextmanager
def trial(
    cfg: CfgNode, trainer_class: type[DefaultTrainer], steps: int
) -> Iterator[DefaultTrainer]:
    """Context with the trainer of a job as a new process builds it, in a temporary folder.

    It has ``steps`` iterations, without a warm-up, and evaluates, saves and writes nothing. Hooks
    of trainkit are left out, hooks of the user's modules are kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        cfg = _config_of_trial(cfg, folder, steps)
        seed_all_rng(None if cfg.SEED < 0 else cfg.SEED)
        trainer = trainer_class(cfg)
        trainer.resume_or_load(resume=False)
        yield trainer


def _config_of_trial(cfg: CfgNode, folder: str, steps: int) -> CfgNode:
    cfg = cfg.clone()
    cfg.defrost()
    cfg.OUTPUT_DIR = folder
    cfg.SOLVER.MAX_ITER = steps
    cfg.SOLVER.STEPS = ()
    cfg.SOLVER.WARMUP_ITERS = 0
    cfg.SOLVER.SCHEDULES = []
    cfg.SOLVER.CHECKPOINT_PERIOD = 0
    cfg.CHECKPOINT.DIR = ""
    cfg.CHECKPOINT.START = 0
    cfg.CHECKPOINT.SAVE_LAST = False
    cfg.CHECKPOINT.BEST_METRIC = ""
    cfg.CHECKPOINT.BEST_TO_KEEP = 1
    cfg.CHECKPOINT.PUBLISH = ""
    cfg.EARLY_STOPPING.METRIC = ""
    cfg.EARLY_STOPPING.THRESHOLD = None
    cfg.DATASETS.VAL = ()
    cfg.DATASETS.TEST = ()
    cfg.TEST.EVAL_PERIOD = 0
    cfg.TEST.EVAL_AT_START = False
    cfg.TEST.EXPECTED_RESULTS = []
    cfg.TEST.PRECISE_BN.ENABLED = False
    cfg.LOG.WRITERS = []
    # the loss of each step is read
    cfg.LOG.ASYNC = False
    cfg.LOG.GATHER_PERIOD = 1
    cfg.SOLVER.NON_FINITE.POLICY = "ignore"
    cfg.SOLVER.GRAPH.ENABLED = False
    import_modules(cfg.IMPORTS)
    cfg.HOOKS = [entry for entry in cfg.HOOKS if _is_of_user(entry)]
    cfg.freeze()
    return cfg


def _is_of_user(entry: str | Mapping[str, Any]) -> bool:
    """Whether an entry of HOOKS names a hook that is registered, but not by trainkit."""
    name: Any = entry if isinstance(entry, str) else entry.get("NAME")
    if name not in HOOK_REGISTRY:
        return False
    module: str = HOOK_REGISTRY.get(name).__module__
    return not module.startswith("trainkit.")
