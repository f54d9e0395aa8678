"""Checks that every config must pass."""

import difflib
import functools
import logging
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import yacs.config

from trainkit.config.config import CfgNode, projects_of
from trainkit.config.defaults import get_cfg
from trainkit.config.errors import ConfigError, not_accepted
from trainkit.config.lengths import LENGTH_KEYS, parse_length
from trainkit.utils import comm
from trainkit.utils.numbers import is_number, is_whole

logger = logging.getLogger(__name__)

# Whole numbers and lengths, and numbers; None is accepted if it is the default. In a list, each item is checked.
_WHOLE = {
    "CHECKPOINT.BEST_TO_KEEP": "[1, inf)",
    "CHECKPOINT.MAX_TO_KEEP": "[1, inf)",
    "CHECKPOINT.START": "[0, inf)",
    "DATALOADER.NUM_WORKERS": "[0, inf)",
    "DATALOADER.OVERFIT_BATCHES": "[0, inf)",
    "DATALOADER.PREFETCH_FACTOR": "[1, inf)",
    "EARLY_STOPPING.PATIENCE": "[1, inf)",
    "LOG.GATHER_PERIOD": "[1, inf)",
    "LOG.PERIOD": "[1, inf)",
    "LOG.WINDOW": "[1, inf)",
    "SEED": f"[-1, {2**32})",
    "SOLVER.ACCUMULATION_STEPS": "[1, inf)",
    "SOLVER.CHECKPOINT_PERIOD": "[0, inf)",
    "SOLVER.IMS_PER_BATCH": "[1, inf)",
    "SOLVER.MAX_BATCHES_PER_EPOCH": "[0, inf)",
    "SOLVER.MAX_ITER": f"[1, {2**63})",
    "SOLVER.NON_FINITE.MAX_IN_ROW": "[1, inf)",
    "SOLVER.NUM_DECAYS": "[0, inf)",
    "SOLVER.REFERENCE_BATCH_SIZE": "[0, inf)",
    "SOLVER.REFERENCE_WORLD_SIZE": "[0, inf)",
    "SOLVER.STEPS": "[0, inf)",
    "SOLVER.WARMUP_ITERS": "[0, inf)",
    "STOP_CHECK_PERIOD": "[1, inf)",
    "TEST.EVAL_PERIOD": "[0, inf)",
    "TEST.EVAL_START": "[0, inf)",
    "TEST.IMS_PER_BATCH": "[1, inf)",
    "TEST.MAX_BATCHES": "[0, inf)",
    "TEST.PRECISE_BN.NUM_ITER": "[1, inf)",
}
_NUMBERS = {
    "DATALOADER.TIMEOUT": "[0, inf)",
    "EARLY_STOPPING.MIN_DELTA": "[0, inf)",
    "EARLY_STOPPING.THRESHOLD": "(-inf, inf)",
    "SOLVER.AMP.INIT_SCALE": "(0, inf)",
    "SOLVER.BASE_LR": "[0, inf)",
    "SOLVER.BASE_LR_END": "[0, inf)",
    "SOLVER.BIAS_LR_FACTOR": "[0, inf)",
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": "(0, inf]",
    "SOLVER.CLIP_GRADIENTS.NORM_TYPE": "(0, inf]",
    "SOLVER.GAMMA": "[0, inf)",
    "SOLVER.MOMENTUM": "[0, 1]",
    "SOLVER.WARMUP_FACTOR": "[0, inf)",
    "SOLVER.WEIGHT_DECAY": "[0, inf)",
    "SOLVER.WEIGHT_DECAY_BIAS": "[0, inf)",
    "SOLVER.WEIGHT_DECAY_NORM": "[0, inf)",
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "CHECKPOINT.BEST_MODE": ("auto", "max", "min"),
    "CHECKPOINT.PUBLISH": ("", "model", "ema"),
    "CHECKPOINT.PUBLISH_FORMAT": ("pth", "safetensors"),
    "DATALOADER.SKIP_MODE": ("shift", "consume"),
    "EARLY_STOPPING.MODE": ("auto", "max", "min"),
    "FLOAT32_PRECISION": ("", "highest", "high", "medium"),
    "LOG.EVAL_AXIS": ("iter", "epoch"),
    "LOG.LEVEL": ("DEBUG", "INFO", "WARNING", "ERROR"),
    "MODEL.DDP.COMPRESSION": ("", "fp16", "bf16"),
    "REQUEUE_SIGNAL": ("", "SIGUSR1", "SIGTERM"),
    "SOLVER.AMP.PRECISION": ("float16", "bfloat16"),
    "SOLVER.NON_FINITE.POLICY": ("raise", "skip", "ignore"),
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": ("value", "norm", "full_model"),
}
# (setting, other setting, reason): they exclude each other; a key without "=" means: if it is on
_CONFLICTS: tuple[tuple[str, str, str], ...] = (
    ("MODEL.DDP.STATIC_GRAPH", "MODEL.DDP.FIND_UNUSED_PARAMETERS", "a static graph finds unused parameters itself"),
    ("DATALOADER.OVERFIT_BATCHES", "SOLVER.MAX_BATCHES_PER_EPOCH", "both say how many batches an epoch has"),
    ("SOLVER.ACCUMULATION_FACTORS", "SOLVER.MAX_BATCHES_PER_EPOCH", "if the factor changes, there are no epochs"),
    ("SOLVER.ACCUMULATION_FACTORS", "DATALOADER.SKIP", "the batches of an iteration are known only when it is reached"),
    ("SOLVER.REFERENCE_BATCH_SIZE", "SOLVER.REFERENCE_WORLD_SIZE", "both scale SOLVER.BASE_LR"),
    ("SOLVER.LOGICAL_RANKS", "MODEL.PARALLEL=fsdp", "shards are summed in an order of their own"),
    ("SOLVER.LOGICAL_RANKS", "MODEL.DDP.COMPRESSION", "it rounds what processes exchange, and one process does not"),
    ("SOLVER.LOGICAL_RANKS", "MODEL.DDP.BROADCAST_BUFFERS", "all processes have the same buffers already"),
    ("SOLVER.LOGICAL_RANKS", "MODEL.DDP.GRADIENT_AS_BUCKET_VIEW", "one process has no buckets"),
    ("SOLVER.LOGICAL_RANKS", "TEST.PRECISE_BN.ENABLED", "its statistics depend on the number of processes"),
)
# (setting, another one): the first, if it is not the default, has no effect without the second
_NEEDS = (
    ("CHECKPOINT.BEST_TO_KEEP", "CHECKPOINT.BEST_METRIC"),
    ("CHECKPOINT.START", "SOLVER.CHECKPOINT_PERIOD"),
    ("EARLY_STOPPING.METRIC", "TEST.EVAL_PERIOD"),
    ("EARLY_STOPPING.THRESHOLD", "EARLY_STOPPING.METRIC"),
)


def check_is_ours(cfg: Any) -> None:
    """Raises ConfigError if ``cfg`` is a CfgNode of another program, which does not have trainkit's keys and checks."""
    if isinstance(cfg, yacs.config.CfgNode) and not isinstance(cfg, CfgNode):
        raise ConfigError(
            f"cfg is a {type(cfg).__module__}.CfgNode, which lacks keys of trainkit; use trainkit's get_cfg "
            "(trainkit.config.get_cfg), and merge your settings into its result"
        )


def check_values(cfg: CfgNode, *, warn: bool = True) -> None:
    """Check for numbers out of range, unknown choices and contradictory settings, before anything is built.

    If ``warn``, a warning names each key that looks misspelled, in nodes that accept new keys.

    Raises:
        ConfigError: names the key, the value and what is accepted.
    """
    check_ranges(cfg, _WHOLE, whole=True)
    check_ranges(cfg, _NUMBERS)
    check_choices(cfg, _CHOICES)
    check_conflicts(cfg, _CONFLICTS)
    defaults = get_cfg()
    for key, needed in _NEEDS:
        if _get(cfg, key) != _get(defaults, key) and not _get(cfg, needed):
            raise ConfigError(f"{key} is {_get(cfg, key)!r}, but {needed} is {_get(cfg, needed)!r}; set it")
    if not cfg.OUTPUT_DIR:
        raise not_accepted("OUTPUT_DIR", "", "a folder")
    if len({*cfg.LOG.WRITERS}) < len(cfg.LOG.WRITERS):
        raise not_accepted("LOG.WRITERS", cfg.LOG.WRITERS, "each name once")
    scale, best = cfg.SOLVER.AMP.LOSS_SCALE, cfg.CHECKPOINT.BEST_METRIC
    if scale != "dynamic" and not _is_in(scale, "(0, inf)"):
        raise not_accepted("SOLVER.AMP.LOSS_SCALE", scale, '"dynamic", or a number in (0, inf)')
    if not all(isinstance(name, str) for name in (best if isinstance(best, list | tuple) else [best or ""])):
        raise not_accepted("CHECKPOINT.BEST_METRIC", best, 'None, a name such as "task/top1", or a list of names')
    check_expected_results(cfg)
    check_logical_ranks(cfg.SOLVER.LOGICAL_RANKS)
    _check_pairs("DATALOADER.SKIP", cfg.DATALOADER.SKIP, 0, slice(None), "[start, end]")
    _check_pairs(
        "SOLVER.ACCUMULATION_FACTORS", cfg.SOLVER.ACCUMULATION_FACTORS, 1, slice(None, None, 2), "[iter, factor]"
    )
    if warn:
        _warn_of_similar_keys(cfg, defaults)
    for project in projects_of(cfg):
        getattr(project, "check", lambda _: None)(cfg)


def check_ranges(cfg: CfgNode, ranges: Mapping[str, str], *, whole: bool = False) -> None:
    """Raises ConfigError if a value is not in its interval, such as ``"[0, inf)"``; NaN is in none.

    Args:
        whole: accept only whole numbers, and lengths in epochs for the keys of ``LENGTH_KEYS``.
    """
    defaults = get_cfg()
    for key, interval in ranges.items():
        value = functools.reduce(getattr, key.split("."), cfg)  # getattr: a project may declare the key now
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is None and functools.reduce(getattr, key.split("."), defaults) is None:
                continue
            if isinstance(item, str) and key in LENGTH_KEYS:
                parse_length(item, key)
            elif not _is_in(item, interval) or (whole and not isinstance(item, int)):
                raise not_accepted(key, value, f"{'a whole number' if whole else 'a number'} in {interval}")


def _is_in(value: object, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(", "))
    if not is_number(value) or (value == low and interval[0] == "(") or (value == high and interval[-1] == ")"):
        return False
    return low <= value <= high


def check_choices(cfg: CfgNode, choices: Mapping[str, Iterable[Any]]) -> None:
    """Raises ConfigError if a value is not one of its choices."""
    for key, accepted in choices.items():
        value = functools.reduce(getattr, key.split("."), cfg)
        if value not in accepted:
            raise not_accepted(key, value, ", ".join(map(repr, accepted)))


def check_conflicts(cfg: CfgNode, conflicts: Iterable[tuple[str, str, str]]) -> None:
    """Raises ConfigError if two settings are on that exclude each other.

    Args:
        conflicts: (key, other key, reason); ``KEY=value`` means this value, ``KEY`` alone that it is on.
    """
    for one, other, reason in conflicts:
        if _is_on(cfg, one) and _is_on(cfg, other):
            raise ConfigError(f"{one} and {other} exclude each other: {reason}; set one of them")


def check_logical_ranks(ranks: int) -> None:
    """Raises ConfigError if ``ranks`` is not a power of two, or cannot be divided over the processes."""
    world_size = comm.get_world_size()
    if ranks < 0 or ranks & (ranks - 1) or ranks % world_size:
        raise ConfigError(
            f"SOLVER.LOGICAL_RANKS is {ranks}, and there are {world_size} processes; accepted: a power of two that is "
            "a multiple of the number of processes, or 0 (off). Change one of the two numbers"
        )


def check_expected_results(cfg: CfgNode) -> None:
    """Raises ConfigError if an entry of TEST.EXPECTED_RESULTS does not have its four parts."""
    for entry in cfg.TEST.EXPECTED_RESULTS:
        if not isinstance(entry, list | tuple) or len(entry) != 4:
            raise not_accepted("TEST.EXPECTED_RESULTS", entry, "entries [task, metric, value, tolerance]")


def _check_pairs(key: str, pairs: list[Any], minimum: int, growing: slice, form: str) -> None:
    is_pair = [isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs]
    numbers: list[Any] = [number for pair in pairs for number in pair] if all(is_pair) else [None]
    if not all(is_whole(n, minimum) for n in numbers) or numbers[growing] != sorted({*numbers[growing]}):
        raise not_accepted(key, pairs, f"a list of {form}, whole numbers from {minimum} on, which grow")


def _warn_of_similar_keys(node: CfgNode, default: CfgNode, prefix: str = "") -> None:
    for name, value in node.items():
        if not hasattr(default, name):  # not "in": a project may declare the key
            for known in difflib.get_close_matches(name.upper(), default, n=1, cutoff=0.8):
                text = "%s is used as a new key, beside %s; correct it if you meant that one"
                logger.warning(text, prefix + name, prefix + known)
        elif isinstance(value, CfgNode) and isinstance(default[name], CfgNode):
            _warn_of_similar_keys(value, default[name], f"{prefix}{name}.")


def _get(cfg: CfgNode, key: str) -> Any:
    return functools.reduce(operator.getitem, key.split("."), cfg)


def _is_on(cfg: CfgNode, setting: str) -> bool:
    """Whether a setting is on; a key that no project has declared is off."""
    key, _, value = setting.partition("=")
    try:
        return _get(cfg, key) == value if value else bool(_get(cfg, key))
    except KeyError:
        return False
