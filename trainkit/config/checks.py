"""What every config has to fulfil, whatever is built from it."""

from typing import Any

from fvcore.common.config import CfgNode

from trainkit.config.errors import ConfigError

_MINIMA = {
    "DATALOADER.NUM_WORKERS": 0,
    "EARLY_STOPPING.PATIENCE": 1,
    "LOG.GATHER_PERIOD": 1,
    "LOG.PERIOD": 1,
    "LOG.WINDOW": 1,
    "SOLVER.ACCUMULATION_STEPS": 1,
    "SOLVER.CHECKPOINT_PERIOD": 0,
    "SOLVER.IMS_PER_BATCH": 1,
    "SOLVER.MAX_ITER": 1,
    "SOLVER.WARMUP_ITERS": 0,
    "TEST.EVAL_PERIOD": 0,
    "TEST.IMS_PER_BATCH": 1,
    "TEST.MAX_BATCHES": 0,
    "TEST.PRECISE_BN.NUM_ITER": 1,
}
_CHOICES = {
    "CHECKPOINT.BEST_MODE": ("max", "min"),
    "EARLY_STOPPING.MODE": ("max", "min"),
    "SOLVER.AMP.PRECISION": ("float16", "bfloat16"),
}


def check_values(cfg: CfgNode) -> None:
    """Find numbers out of range, unknown choices and settings that contradict each other, before anything is built.

    Raises:
        ConfigError: names the key, the value and what is accepted.
    """
    for key, minimum in _MINIMA.items():
        value = _get(cfg, key)
        if not isinstance(value, str) and value < minimum:  # a string is a length in epochs, which is never negative
            raise ConfigError(f"{key} is {value}; it must be at least {minimum}")
    for key, choices in _CHOICES.items():
        if _get(cfg, key) not in choices:
            raise ConfigError(f"{key} is {_get(cfg, key)!r}; accepted: {', '.join(choices)}")
    if cfg.EARLY_STOPPING.METRIC and cfg.TEST.EVAL_PERIOD == 0:
        raise ConfigError(
            "EARLY_STOPPING.METRIC is set but TEST.EVAL_PERIOD is 0, so nothing is evaluated before the end; set it"
        )


def _get(cfg: CfgNode, key: str) -> Any:
    node = cfg
    for part in key.split("."):
        node = node[part]
    return node
