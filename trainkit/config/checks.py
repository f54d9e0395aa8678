"""Checks that every config must pass before anything is built."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from trainkit.config.config import CfgNode, changed_settings, get_key
from trainkit.config.defaults import ACCEPTED, core_defaults, get_cfg
from trainkit.config.lengths import LENGTH_KEYS, parse_length
from trainkit.config.projects import check_projects, projects_in_use, with_keys_of
from trainkit.utils.errors import ConfigError, not_accepted
from trainkit.utils.periods import is_in

KEYS_OF_SCHEDULE = [
    "SOLVER.LR_SCHEDULER_NAME",
    "SOLVER.STEPS",
    "SOLVER.GAMMA",
    "SOLVER.NUM_DECAYS",
    "SOLVER.BASE_LR_END",
    "SOLVER.WARMUP_ITERS",
    "SOLVER.WARMUP_FACTOR",
    "SOLVER.WARMUP_METHOD",
]
"""The keys of trainkit's own schedules; a schedule from elsewhere does not use them."""


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
    is_broken_address = re.match(r"\w+:/(?!/)", cfg.OUTPUT_DIR) is not None
    if not cfg.OUTPUT_DIR.strip() or is_broken_address:
        raise not_accepted(
            "OUTPUT_DIR", cfg.OUTPUT_DIR, "a folder, or an address such as s3://bucket/run"
        )
    writers = cfg.LOG.WRITERS
    if len(set(writers)) < len(writers):
        raise not_accepted("LOG.WRITERS", writers, "each writer once")
    if cfg.LOG.HISTORY_LENGTH < cfg.LOG.WINDOW:
        raise not_accepted(
            "LOG.HISTORY_LENGTH", cfg.LOG.HISTORY_LENGTH, f"at least LOG.WINDOW, {cfg.LOG.WINDOW}"
        )
    if cfg.SOLVER.AMP.ENABLED:
        scale = cfg.SOLVER.AMP.LOSS_SCALE
        if scale != "dynamic" and not is_in(scale, "(0, inf)"):
            raise not_accepted("SOLVER.AMP.LOSS_SCALE", scale, '"dynamic", or a number in (0, inf)')
    if "SOLVER.WARMUP_ITERS" not in unused:
        warmup_length(cfg.SOLVER)
    check_projects(cfg)


def unused_keys(cfg: CfgNode) -> set[str]:
    """Keys of features that are off. No run looks at their values, so every value is accepted."""
    solver = cfg.SOLVER
    unused = set[str]()

    def add(prefix: str, names: str) -> None:
        for name in names.split():
            unused.add(f"{prefix}.{name}")

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
    unused.update(_unused_of_schedule(solver))
    if solver.CHECKPOINT_PERIOD == 0:
        add("CHECKPOINT", "START")
    if not cfg.CHECKPOINT.BEST_METRIC:
        add("CHECKPOINT", "BEST_MODE")
    if cfg.TEST.EVAL_PERIOD == 0:
        add("TEST", "EVAL_START")
    if not cfg.EARLY_STOPPING.METRIC:
        add("EARLY_STOPPING", "MODE PATIENCE MIN_DELTA MIN_DELTA_MODE THRESHOLD DIVERGENCE START")
    if cfg.MODEL.PARALLEL != "ddp":
        add("MODEL.DDP", "COMPRESSION")
    if cfg.DATALOADER.NUM_WORKERS == 0:
        add("DATALOADER", "PREFETCH_FACTOR TIMEOUT")
    for plugin in projects_in_use(cfg):
        unused.update(plugin.unused_keys(with_keys_of(cfg, plugin)))
    return unused


def _unused_of_schedule(solver: CfgNode) -> list[str]:
    """The keys that the chosen schedule does not have."""
    if solver.LR_SCHEDULER_BUILDER:  # such a function checks what it uses itself
        return KEYS_OF_SCHEDULE
    unused = list(_UNUSED_OF_SCHEDULES.get(solver.LR_SCHEDULER_NAME, []))
    if solver.WARMUP_ITERS == 0:
        unused += ["SOLVER.WARMUP_FACTOR", "SOLVER.WARMUP_METHOD"]
    return unused


_UNUSED_OF_SCHEDULES = {
    "WarmupMultiStepLR": ["SOLVER.NUM_DECAYS", "SOLVER.BASE_LR_END"],
    "WarmupCosineLR": ["SOLVER.STEPS", "SOLVER.GAMMA", "SOLVER.NUM_DECAYS"],
    "WarmupLinearLR": ["SOLVER.STEPS", "SOLVER.GAMMA", "SOLVER.NUM_DECAYS"],
    "WarmupStepWithFixedGammaLR": ["SOLVER.STEPS", "SOLVER.BASE_LR_END"],
}


def _check_none(cfg: CfgNode, unused: Collection[str]) -> None:
    """Raises ConfigError if a text is None that has no "off": its default is not empty."""
    for key, default in changed_settings(core_defaults(), CfgNode()):
        has_off = not isinstance(default, str) or not default
        if has_off or key in unused:
            continue
        node: Any = cfg
        *parents, name = key.split(".")
        if parents:
            node = get_key(cfg, ".".join(parents))
        if isinstance(node, CfgNode) and name in node and node[name] is None:
            raise not_accepted(key, None, f"text, such as {default!r}")


def warmup_length(solver: CfgNode) -> Any:
    """WARMUP_ITERS, at most 5 % of the run if it is not set.

    Lengths in epochs are not compared; without them it is a number of iterations.

    Raises:
        ConfigError: it is longer than the run.
    """
    warmup = solver.WARMUP_ITERS
    max_iter = solver.MAX_ITER
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
        table: accepted values -> keys. The values are a tuple, or an interval such as
            ``"[0, inf)"``. A key whose default is an int takes whole numbers, and if it is one of
            ``LENGTH_KEYS``, also epochs. A key whose default is None takes None.
        unused: keys that are not looked at.
    """
    defaults = get_cfg()
    for accepted, keys in table.items():
        for key in keys.split():
            if key not in unused:
                _check_key(cfg, key, accepted, default=_value_of(defaults, key))


def _value_of(cfg: CfgNode, key: str) -> Any:
    """The value of a full key. Raises AttributeError if it is not there."""
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _check_key(cfg: CfgNode, key: str, accepted: Any, default: Any) -> None:
    value = _value_of(cfg, key)
    is_whole = isinstance(default, int) or key in LENGTH_KEYS
    items = value if isinstance(value, list | tuple) else [value]
    for item in items:
        if item is None and default is None:
            continue
        if isinstance(item, str) and key in LENGTH_KEYS:
            parse_length(item, key)
            continue
        if not isinstance(accepted, str):
            if item not in accepted:
                raise not_accepted(key, value, ", ".join(map(repr, accepted)))
            continue
        is_accepted = is_in(item, accepted)
        if is_whole and not isinstance(item, int):
            is_accepted = False
        if not is_accepted:
            number = "whole number" if is_whole else "number"
            raise not_accepted(key, value, f"a {number} in {accepted}")


def check_conflicts(cfg: CfgNode, conflicts: Iterable[tuple[str, str, str]]) -> None:
    """Raises ConfigError if two settings are on that exclude each other.

    Args:
        conflicts: (key, other key, reason); ``KEY=value`` means this value, ``KEY`` alone that it
            is on.
    """
    for setting, other, reason in conflicts:
        if _is_set_so(cfg, setting) and _is_set_so(cfg, other):
            raise ConfigError(
                f"{setting} and {other} exclude each other: {reason}; set one of them"
            )


def _is_set_so(cfg: CfgNode, setting: str) -> bool:
    """Whether ``KEY=value`` is true, or ``KEY`` is on."""
    key, equals, wanted = setting.partition("=")
    value = get_key(cfg, key)
    if equals:
        return bool(value == wanted)
    return bool(value)
