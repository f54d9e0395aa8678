"""``--fast-dev-run``: every part of a run in seconds, to find errors."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from trainkit.config import CfgNode
from trainkit.config.config import get_key
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase

logger = logging.getLogger(__name__)

_FOLDER = "fast_dev_run"
_SETTINGS: dict[str, dict[str, Any]] = {
    "SOLVER": {
        "MAX_ITER": 6,
        "STEPS": (),
        "WARMUP_ITERS": 1,
        "CHECKPOINT_PERIOD": 3,
    },
    "CHECKPOINT": {"DIR": ""},
    "TEST": {"EVAL_PERIOD": 3, "EVAL_AT_START": True, "MAX_BATCHES": 2, "EXPECTED_RESULTS": []},
    "LOG": {"PERIOD": 1},
}
# those of other projects, which may be missing
_OF_PROJECTS: dict[str, Any] = {"SOLVER.SCHEDULES": [], "FORK.RUN": ""}
# with the periods and starts of a long run most hooks would do nothing
_EARLY = {"PERIOD": 1, "INTERVAL": 1, "BEGIN": 0}


def apply(cfg: Any) -> None:
    """Change the config in place; a script with a LazyConfig does it itself."""
    if isinstance(cfg, CfgNode) and os.path.basename(cfg.OUTPUT_DIR) != _FOLDER:
        cfg.update(fast_dev_config(cfg))  # by item, since the config may be frozen


def fast_dev_config(cfg: CfgNode) -> CfgNode:
    """A frozen copy that tries every part of the run in seconds, in its own folder ``OUTPUT_DIR/fast_dev_run``."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg["OUTPUT_DIR"] = os.path.join(cfg.OUTPUT_DIR, _FOLDER)
    for name, settings in _SETTINGS.items():
        for key, value in settings.items():
            setattr(cfg[name], key, value)  # it counts as set by the user
    for key, value in _OF_PROJECTS.items():
        if get_key(cfg, key) is not None:
            node, _, name = key.partition(".")
            cfg[node][name] = value
    precise_bn = get_key(cfg, "TEST.PRECISE_BN")
    if precise_bn is not None and precise_bn.ENABLED:
        precise_bn["NUM_ITER"] = 2
    hooks = []
    for entry in cfg.HOOKS:
        if not isinstance(entry, Mapping):
            hooks.append(entry)
        elif entry.get("NAME") != "ParamScheduler":  # a schedule is too long for six steps
            hooks.append({key: _EARLY.get(key, value) for key, value in entry.items()})
    hooks.append({"NAME": "LoadsAgain"})
    cfg["HOOKS"] = hooks
    cfg.freeze()
    return cfg


@HOOK_REGISTRY.register()
class LoadsAgain(HookBase):
    """Loads the model of the last checkpoint at the end of the run."""

    def after_train(self) -> None:
        checkpointer = self.trainer.checkpointer
        if self.trainer.failure is None and checkpointer.has_checkpoint():
            checkpointer.load(checkpointer.get_checkpoint_file(), [])
            logger.info(
                "The trial run has ended without an error, and its last checkpoint loads again"
            )
