"""Compare the settings of a run with those of its checkpoint, or of another run."""

import re
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from trainkit.projects.replay.origin import THREADS

from trainkit.config import CfgNode, get_cfg
from trainkit.config.config import changed_settings
from trainkit.config.yaml_files import parse_literal
from trainkit.utils.logger import format_table

# these do not change what is computed; a resumed run does not read MODEL.WEIGHTS
_NO_MATTER = re.compile(
    r"VERSION|OUTPUT_DIR|IMPORTS|STOP_CHECK_PERIOD|REQUEUE_SIGNAL|STEP_TIMEOUT|MODEL\.WEIGHTS|TEST\.EXPECTED_RESULTS|CHECKPOINT\..*"
    r"|LOG\..*|FORK\..*|DATALOADER\.(NUM_WORKERS|PREFETCH_FACTOR|PERSISTENT_WORKERS|TIMEOUT)"
)
# a resumed run takes these from the saved states of random numbers, optimizer and gradient scaler
_OF_CHECKPOINT = re.compile(
    r"SEED|SOLVER\.(BASE_LR|REFERENCE_BATCH_SIZE|MOMENTUM|NESTEROV|WEIGHT_DECAY(_NORM|_BIAS)?|BIAS_LR_FACTOR"
    r"|OPTIMIZER(?!\.NAME).*|PARAM_GROUP.*|AMP\.INIT_SCALE)"
)


def changes_since(cfg: CfgNode, former: CfgNode) -> list[tuple[str, Any, Any]]:
    """(full key, former value, value) of each setting that changes what a run computes and differs from ``former``."""
    before, changed = dict(changed_settings(former, CfgNode())), changed_settings(cfg, former.clone())
    return [(key, before.get(key), value) for key, value in changed if not _NO_MATTER.fullmatch(key)]


def settings_of(cfg: CfgNode) -> dict[str, str]:
    """key -> value as text of the settings that change what a run computes; and the number of threads."""
    found = {key: repr(value) for key, _, value in changes_since(cfg, CfgNode())}
    return {**found, THREADS: str(torch.get_num_threads())}


def other_settings(saved: Mapping[str, str], cfg: CfgNode) -> list[tuple[str, str, str]]:
    """(key, value, saved value) of each difference between ``settings_of(cfg)`` and saved settings."""
    own, rows = settings_of(cfg), []
    saved = {THREADS: own[THREADS], **saved}  # an older file does not say it
    for key in dict.fromkeys([*own, *saved]):
        # only one of the two may know a key of a project: the other has its default
        here, there = own.get(key) or _default(key), saved.get(key) or _default(key)
        # parsed: the order of keys may differ, since config.yaml has them in alphabetical order
        if key != "number of processes" and parse_literal(here) != parse_literal(str(there)):  # older states have it
            rows.append((key, here, there))
    return rows


def table_of(rows: Iterable[tuple[str, str, str]]) -> str:
    """The result of `other_settings` as a table, with the value that is used."""
    used = [(*row, "checkpoint" if _OF_CHECKPOINT.fullmatch(row[0]) else "this run") for row in rows]
    return format_table(used, ("setting", "of this run", "in the checkpoint", "what is used"), disable_numparse=True)


def _default(key: str) -> str:
    """The default of a key as text; "-" if there is no such key, or its project is not there."""
    try:
        return repr(reduce(getattr, key.split("."), get_cfg()))
    except (AttributeError, ImportError):
        return "-"
