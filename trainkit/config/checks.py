"""Checks that every config must pass before anything is built."""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import reduce
from typing import Any

from trainkit.config.config import CfgNode, changed_settings, get_key
from trainkit.config.defaults import ACCEPTED, core_defaults, get_cfg
from trainkit.config.lengths import LENGTH_KEYS, parse_length
from trainkit.config.projects import check_projects
from trainkit.utils.errors import ConfigError, not_accepted
from trainkit.utils.periods import is_in


def check_values(cfg: Any) -> None:
    """Raises ConfigError for a value that its key does not accept, also for keys of projects."""
    if not isinstance(cfg, CfgNode):
        raise ConfigError(
            f"cfg is a {type(cfg).__module__}.{type(cfg).__name__}; use trainkit's get_cfg"
        )
    unused = unused_keys(cfg)
    _check_none(cfg, unused)
    check_accepted(cfg, ACCEPTED, unused)
    for entry in cfg.TEST.EXPECTED_RESULTS:
        if not isinstance(entry, list | tuple) or len(entry) != 4:
            raise not_accepted(
                "TEST.EXPECTED_RESULTS", entry, "entries [task, metric, value, tolerance]"
            )
    if not cfg.OUTPUT_DIR.strip() or re.match(r"\w+:/(?!/)", cfg.OUTPUT_DIR):
        raise not_accepted(
            "OUTPUT_DIR", cfg.OUTPUT_DIR, "a folder, or an address such as s3://bucket/run"
        )
    if len({*cfg.LOG.WRITERS}) < len(cfg.LOG.WRITERS):
        raise not_accepted("LOG.WRITERS", cfg.LOG.WRITERS, "each writer once")
    scale = cfg.SOLVER.AMP.LOSS_SCALE
    if cfg.SOLVER.AMP.ENABLED and scale != "dynamic" and not _is_in(scale, "(0, inf)", False):
        raise not_accepted("SOLVER.AMP.LOSS_SCALE", scale, '"dynamic", or a number in (0, inf)')
    if "SOLVER.WARMUP_ITERS" not in unused:
        warmup_length(cfg.SOLVER)
    check_projects(cfg)


def unused_keys(cfg: CfgNode) -> set[str]:
    """Keys of features that are off. No run looks at their values, so every value is accepted."""
    solver, test, checkpoint = cfg.SOLVER, cfg.TEST, cfg.CHECKPOINT
    unused = set[str]()

    def add(prefix: str, names: str) -> None:
        unused.update(f"{prefix}.{name}" for name in names.split())

    if not solver.CLIP_GRADIENTS.ENABLED:
        add("SOLVER.CLIP_GRADIENTS", "CLIP_TYPE CLIP_VALUE NORM_TYPE")
    if not solver.AMP.ENABLED:
        add("SOLVER.AMP", "PRECISION LOSS_SCALE")
    if not solver.AMP.ENABLED or solver.AMP.PRECISION != "float16":
        add("SOLVER.AMP", "INIT_SCALE")
    if not solver.AMP.ENABLED and solver.NON_FINITE.POLICY in ("raise", "ignore"):
        add("SOLVER.NON_FINITE", "MAX_IN_ROW")
    if not isinstance(solver.OPTIMIZER, str) and solver.OPTIMIZER.get("LR") is not None:
        add("SOLVER", "BASE_LR")
    add("SOLVER", _unused_of_schedule(solver))
    if solver.CHECKPOINT_PERIOD == 0:
        add("CHECKPOINT", "START")
    if not checkpoint.BEST_METRIC:
        add("CHECKPOINT", "BEST_MODE")
    if test.EVAL_PERIOD == 0:
        add("TEST", "EVAL_START")
    if not cfg.EARLY_STOPPING.METRIC:
        add("EARLY_STOPPING", "MODE PATIENCE MIN_DELTA MIN_DELTA_MODE THRESHOLD DIVERGENCE START")
    if cfg.MODEL.PARALLEL != "ddp":
        add("MODEL.DDP", "COMPRESSION")
    if cfg.DATALOADER.NUM_WORKERS == 0:
        add("DATALOADER", "PREFETCH_FACTOR TIMEOUT")
    return unused


def _unused_of_schedule(solver: CfgNode) -> str:
    """The keys of SOLVER that the chosen schedule does not have, in one text."""
    of_warmup = "WARMUP_FACTOR WARMUP_METHOD"
    # a function of LR_SCHEDULER_BUILDER checks what it uses itself
    if solver.LR_SCHEDULER_BUILDER or solver.get("SCHEDULES"):
        return f"LR_SCHEDULER_NAME STEPS GAMMA NUM_DECAYS BASE_LR_END WARMUP_ITERS {of_warmup}"
    unused = {
        "WarmupMultiStepLR": "NUM_DECAYS BASE_LR_END",
        "WarmupCosineLR": "STEPS GAMMA NUM_DECAYS",
        "WarmupLinearLR": "STEPS GAMMA NUM_DECAYS",
        "WarmupStepWithFixedGammaLR": "STEPS BASE_LR_END",
    }.get(solver.LR_SCHEDULER_NAME, "")
    if solver.WARMUP_ITERS == 0:
        unused = f"{unused} {of_warmup}"
    return unused


def _check_none(cfg: CfgNode, unused: Collection[str]) -> None:
    """Raises ConfigError if a text is None that has no "off": its default is not empty."""
    for key, default in changed_settings(core_defaults(), CfgNode()):
        *parents, name = key.split(".")
        node = get_key(cfg, ".".join(parents)) if parents else cfg
        is_none = isinstance(node, CfgNode) and name in node and node[name] is None
        if is_none and isinstance(default, str) and default and key not in unused:
            raise not_accepted(key, None, f"text, such as {default!r}")


def warmup_length(solver: CfgNode) -> Any:
    """WARMUP_ITERS, at most 5 % of the run if it is not set. Raises ConfigError if it is longer than the run.

    Lengths in epochs are not compared; without them it is a number of iterations.
    """
    warmup, max_iter = solver.WARMUP_ITERS, solver.MAX_ITER
    if not isinstance(warmup, int) or not isinstance(max_iter, int):
        return warmup
    if not solver.is_set("WARMUP_ITERS"):
        return min(warmup, max_iter // 20)
    if warmup > max_iter:
        raise not_accepted("SOLVER.WARMUP_ITERS", warmup, f"at most SOLVER.MAX_ITER, {max_iter}")
    return warmup


def check_accepted(cfg: CfgNode, table: Mapping[Any, str], unused: Collection[str] = ()) -> None:
    """Raises ConfigError if a value, or an item of a list, is not accepted.

    Args:
        table: accepted values -> keys. The values are a tuple, or an interval such as ``"[0, inf)"``. A key whose
            default is an int takes whole numbers, and if it is one of ``LENGTH_KEYS``, also epochs. A key whose default
            is None takes None.
        unused: keys that are not looked at.
    """
    defaults = get_cfg()
    for accepted, key in (
        (accepted, key) for accepted, keys in table.items() for key in keys.split()
    ):
        if key in unused:
            continue
        value, default = (reduce(getattr, key.split("."), node) for node in (cfg, defaults))
        is_whole = isinstance(default, int) or key in LENGTH_KEYS
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, str) and key in LENGTH_KEYS:
                parse_length(item, key)
            elif not _is_in(item, accepted, is_whole) and not (item is default is None):
                text = f"a {'whole ' * is_whole}number in {accepted}"
                raise not_accepted(
                    key,
                    value,
                    text if isinstance(accepted, str) else ", ".join(map(repr, accepted)),
                )


def _is_in(value: Any, accepted: Any, is_whole: bool) -> bool:
    if not isinstance(accepted, str):
        return value in accepted
    return is_in(value, accepted) and (isinstance(value, int) or not is_whole)


def check_conflicts(cfg: CfgNode, conflicts: Iterable[tuple[str, str, str]]) -> None:
    """Raises ConfigError if two settings are on that exclude each other.

    Args:
        conflicts: (key, other key, reason); ``KEY=value`` means this value, ``KEY`` alone that it is on.
    """
    for *settings, reason in conflicts:
        parts = [setting.partition("=") for setting in settings]
        if all(
            get_key(cfg, key) == wanted if equals else get_key(cfg, key)
            for key, equals, wanted in parts
        ):
            raise ConfigError(
                f"{' and '.join(settings)} exclude each other: {reason}; set one of them"
            )
