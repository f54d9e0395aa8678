"""Checks that every config must pass."""

import difflib
import functools
import logging
import operator
import re
from collections.abc import Iterable
from itertools import pairwise
from operator import ne
from typing import Any

import yacs.config

from trainkit.config.config import CfgNode, projects_of
from trainkit.config.defaults import get_cfg
from trainkit.config.errors import ConfigError
from trainkit.utils import comm
from trainkit.utils.numbers import is_number, is_whole

logger = logging.getLogger(__name__)

_DIGITS = re.compile(r"\d+")
_MINIMA = {
    "CHECKPOINT.BEST_TO_KEEP": 1,
    "CHECKPOINT.START": 0,
    "DATALOADER.NUM_WORKERS": 0,
    "DATALOADER.OVERFIT_BATCHES": 0,
    "DATALOADER.TIMEOUT": 0,
    "EARLY_STOPPING.PATIENCE": 1,
    "LOG.GATHER_PERIOD": 1,
    "LOG.PERIOD": 1,
    "LOG.WINDOW": 1,
    "MODEL.TENSOR_PARALLEL": 1,
    "SOLVER.ACCUMULATION_STEPS": 1,
    "SOLVER.CHECKPOINT_PERIOD": 0,
    "SOLVER.IMS_PER_BATCH": 1,
    "SOLVER.MAX_BATCHES_PER_EPOCH": 0,
    "SOLVER.MAX_ITER": 1,
    "SOLVER.NON_FINITE.MAX_IN_ROW": 1,
    "SOLVER.PARAM_GROUPS.LAYER_DECAY.NUM_LAYERS": 0,
    "SOLVER.REFERENCE_BATCH_SIZE": 0,
    "SOLVER.WARMUP_ITERS": 0,
    "STOP_CHECK_PERIOD": 1,
    "TEST.EVAL_PERIOD": 0,
    "TEST.EVAL_START": 0,
    "TEST.IMS_PER_BATCH": 1,
    "TEST.MAX_BATCHES": 0,
    "TEST.PRECISE_BN.NUM_ITER": 1,
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
    "MODEL.COMPILE.DYNAMIC": (False, True, None),
    "MODEL.COMPILE.MODE": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    "MODEL.DDP.COMPRESSION": ("", "fp16", "bf16"),
    "MODEL.FSDP.PARAM_DTYPE": ("", "float32", "float16", "bfloat16"),
    "MODEL.FSDP.REDUCE_DTYPE": ("", "float32", "float16", "bfloat16"),
    "MODEL.PARALLEL": ("ddp", "fsdp"),
    "REQUEUE_SIGNAL": ("", "SIGUSR1", "SIGTERM"),
    "SOLVER.AMP.PRECISION": ("float16", "bfloat16"),
    "SOLVER.NON_FINITE.POLICY": ("raise", "skip", "ignore"),
    "SOLVER.PARAM_GROUPS.KEY_MATCH": ("longest", "shortest", "exact"),
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
_GROUPS = "SOLVER.PARAM_GROUPS"


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
    for key, minimum in _MINIMA.items():
        value = _get(cfg, key)
        if not isinstance(value, str) and value < minimum:  # a string is a length in epochs, never negative
            raise ConfigError(f"{key} is {value}; it must be at least {minimum}")
    for key, choices in _CHOICES.items():
        if _get(cfg, key) not in choices:
            accepted = ", ".join('""' if choice == "" else str(choice) for choice in choices)
            raise ConfigError(f"{key} is {_get(cfg, key)!r}; accepted: {accepted}")
    check_conflicts(cfg, _CONFLICTS)
    if not cfg.OUTPUT_DIR:
        raise ConfigError("OUTPUT_DIR is empty, so nothing could be saved; set it to a folder")
    check_logical_ranks(cfg.SOLVER.LOGICAL_RANKS)
    _check_tensor_parallel(cfg.MODEL)
    _check_amp(cfg.SOLVER.AMP)
    check_expected_results(cfg)
    if warn:
        _warn_of_similar_keys(cfg, get_cfg())
    _check_param_groups(cfg.SOLVER)
    _check_early_stopping(cfg)
    _check_checkpoints(cfg)
    _check_skip(cfg.DATALOADER.SKIP)
    _check_factors(cfg.SOLVER.ACCUMULATION_FACTORS)
    for project in projects_of(cfg):
        getattr(project, "check", lambda _: None)(cfg)


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


def _check_tensor_parallel(model: CfgNode) -> None:
    size, world_size = model.TENSOR_PARALLEL, comm.get_world_size()
    if size > 1 and (model.PARALLEL != "fsdp" or (world_size > 1 and world_size % size)):
        raise ConfigError(
            f"MODEL.TENSOR_PARALLEL is {size}, MODEL.PARALLEL is {model.PARALLEL}, and the number of processes is "
            f"{world_size}; accepted: with MODEL.PARALLEL fsdp, a divisor of the number of processes; else 1"
        )


def check_expected_results(cfg: CfgNode) -> None:
    """Raises ConfigError if an entry of TEST.EXPECTED_RESULTS does not have its four parts."""
    for entry in cfg.TEST.EXPECTED_RESULTS:
        if not isinstance(entry, list | tuple) or len(entry) != 4:
            raise ConfigError(
                f"TEST.EXPECTED_RESULTS has the entry {entry!r}; each must be [task, metric, value, tolerance]"
            )


def _warn_of_similar_keys(node: CfgNode, default: CfgNode, prefix: str = "") -> None:
    """Compare each new key with the keys before it: first the default keys, then the keys of files."""
    names = [*node]
    for place, name in enumerate(names):
        if hasattr(default, name):  # not "in": a project may declare the key
            if isinstance(node[name], CfgNode) and isinstance(default[name], CfgNode):
                _warn_of_similar_keys(node[name], default[name], f"{prefix}{name}.")
            continue
        for known in difflib.get_close_matches(name.upper(), names[:place], n=1, cutoff=0.8):
            # a misspelled key has one letter more or less, or the same letters in another order; a different letter may
            # have a meaning (KERNEL_H and KERNEL_W), but not if trainkit itself has the similar key
            is_likely = abs(len(name) - len(known)) == 1 or sorted(name.upper()) == sorted(known)
            if known in default and len(name) == len(known):
                is_likely |= sum(map(ne, name.upper(), known)) == 1
            if is_likely and _DIGITS.sub("", name) != _DIGITS.sub("", known):
                logger.warning(
                    "%s is used as a new key, beside %s; correct it if you meant that one",
                    *(prefix + name, prefix + known),
                )


def _check_early_stopping(cfg: CfgNode) -> None:
    metric, threshold = cfg.EARLY_STOPPING.METRIC, cfg.EARLY_STOPPING.THRESHOLD
    if metric and cfg.TEST.EVAL_PERIOD == 0:
        raise ConfigError(
            "EARLY_STOPPING.METRIC is set but TEST.EVAL_PERIOD is 0, so nothing is evaluated before the end; set it"
        )
    if threshold is not None and not is_number(threshold):
        raise ConfigError(f"EARLY_STOPPING.THRESHOLD is {threshold!r}; accepted: a number, None")
    if threshold is not None and not metric:
        raise ConfigError(f"EARLY_STOPPING.THRESHOLD is {threshold}, but EARLY_STOPPING.METRIC is empty; set it")


def _check_checkpoints(cfg: CfgNode) -> None:
    options = cfg.CHECKPOINT
    keep, best = options.MAX_TO_KEEP, options.BEST_METRIC
    if keep is not None and not is_whole(keep, 1):
        raise ConfigError(f"CHECKPOINT.MAX_TO_KEEP is {keep!r}; accepted: a number of at least 1, or None to keep all")
    names = best if isinstance(best, list | tuple) else [best or "none"]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f'CHECKPOINT.BEST_METRIC is {best!r}; accepted: None, a name such as "task/top1", or a list')
    if options.BEST_TO_KEEP > 1 and not best:
        raise ConfigError(f"CHECKPOINT.BEST_TO_KEEP is {options.BEST_TO_KEEP}, but BEST_METRIC is empty; set it")
    if options.START and cfg.SOLVER.CHECKPOINT_PERIOD == 0:
        raise ConfigError(
            f"CHECKPOINT.START is {options.START}, but SOLVER.CHECKPOINT_PERIOD is 0: nothing is saved before the end; "
            "set it, or leave out START"
        )
    if options.PUBLISH and not options.SAVE_LAST and not best:
        raise ConfigError(
            f"CHECKPOINT.PUBLISH is {options.PUBLISH!r}, but without CHECKPOINT.SAVE_LAST and CHECKPOINT.BEST_METRIC "
            "there is nothing to publish; set one of them"
        )


def _check_skip(ranges: list[Any]) -> None:
    ends = [end for pair in _pairs(ranges) for end in pair]
    if not all(is_whole(end, 0) for end in ends) or any(end >= after for end, after in pairwise(ends)):
        raise ConfigError(
            f"DATALOADER.SKIP is {ranges!r}; accepted: a list of [start, end] in iterations from 0, without end, which "
            "grow from one to the next, such as [[100, 120], [300, 310]]"
        )


def _check_factors(factors: list[Any]) -> None:
    starts = [start for start, _ in _pairs(factors)]
    if not all(is_whole(number, 1) for pair in _pairs(factors) for number in pair) or starts != sorted({*starts}):
        raise ConfigError(
            f"SOLVER.ACCUMULATION_FACTORS is {factors!r}; accepted: a list of [iteration, factor], both whole numbers "
            "from 1 on, whose iterations grow, such as [[1000, 2], [5000, 4]]"
        )


def _pairs(entries: list[Any]) -> list[Any]:
    return [entry if isinstance(entry, list | tuple) and len(entry) == 2 else [-1, -1] for entry in entries]


def _check_amp(amp: CfgNode) -> None:
    fixed = amp.LOSS_SCALE != "dynamic"
    for key in ("LOSS_SCALE", "INIT_SCALE") if fixed else ("INIT_SCALE",):
        scale = amp[key]
        if not is_number(scale) or not 0 < scale < float("inf"):
            dynamic = '"dynamic" or ' if key == "LOSS_SCALE" else ""
            raise ConfigError(f"SOLVER.AMP.{key} is {scale!r}; accepted: {dynamic}a number greater than 0")
    if fixed and amp.PRECISION == "bfloat16":
        raise ConfigError(
            f"SOLVER.AMP.LOSS_SCALE is {amp.LOSS_SCALE}, but PRECISION is bfloat16, which has no scale; "
            "leave LOSS_SCALE at dynamic, or set PRECISION to float16"
        )
    if amp.INIT_SCALE != 65536 and (fixed or amp.PRECISION == "bfloat16"):
        raise ConfigError(
            f"SOLVER.AMP.INIT_SCALE is {amp.INIT_SCALE}, but no dynamic scale starts with it: PRECISION is "
            f"{amp.PRECISION} and LOSS_SCALE is {amp.LOSS_SCALE}; leave INIT_SCALE at 65536"
        )


def _check_param_groups(solver: CfgNode) -> None:
    options, layer_decay = solver.PARAM_GROUPS, solver.PARAM_GROUPS.LAYER_DECAY
    given = {key: value for key, value in options.items() if key.endswith("_FACTOR") and value is not None}
    seen = set()
    for entry in options.CUSTOM_KEYS:
        key = entry.get("KEY") if isinstance(entry, dict) else None
        if not isinstance(key, str) or not key or key in seen:
            raise ConfigError(
                f"{_GROUPS}.CUSTOM_KEYS has the entry {entry!r}; each one is a node with a KEY that no other has, a "
                "part of the names of parameters, such as {KEY: backbone.stem, LR_FACTOR: 0.1}"
            )
        seen.add(key)
        factors = [name for name in ("LR_FACTOR", "DECAY_FACTOR") if name in entry]
        given |= {f"CUSTOM_KEYS, {key}, {name}": entry[name] for name in factors}
    for key, factor in given.items():
        if not is_number(factor) or not factor >= 0:
            raise ConfigError(f"{_GROUPS}.{key} is {factor!r}; accepted: a number of at least 0")
    if not 0 < layer_decay.RATE <= 1:
        raise ConfigError(f"{_GROUPS}.LAYER_DECAY.RATE is {layer_decay.RATE}; it must be above 0, and at most 1 (off)")
    if layer_decay.RATE != 1 and not layer_decay.SCHEME:
        raise ConfigError(
            f"{_GROUPS}.LAYER_DECAY.RATE is {layer_decay.RATE}, but SCHEME is empty; set it to the kind of the model, "
            "such as vit"
        )
    others = [*given, *["LAYER_DECAY.RATE"] * (layer_decay.RATE != 1), *["CUSTOM_KEYS"] * bool(seen)]
    if options.BUILDER and others:
        named = ", ".join(f"{_GROUPS}.{key}" for key in others)
        raise ConfigError(f"{_GROUPS}.BUILDER {options.BUILDER!r} makes all groups; leave it out, or {named}")
    if options.NORM_DECAY_FACTOR and solver.WEIGHT_DECAY and not solver.WEIGHT_DECAY_NORM:
        raise ConfigError(
            f"{_GROUPS}.NORM_DECAY_FACTOR is {options.NORM_DECAY_FACTOR}, but it multiplies SOLVER.WEIGHT_DECAY_NORM, "
            f"which is 0; set that to {solver.WEIGHT_DECAY}, SOLVER.WEIGHT_DECAY, or leave the factor out"
        )


def _get(cfg: CfgNode, key: str) -> Any:
    return functools.reduce(operator.getitem, key.split("."), cfg)


def _is_on(cfg: CfgNode, setting: str) -> bool:
    """Whether a setting is on; a key that no project has declared is off."""
    key, _, value = setting.partition("=")
    try:
        return _get(cfg, key) == value if value else bool(_get(cfg, key))
    except KeyError:
        return False
