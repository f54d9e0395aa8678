"""Compare the settings of a run with the defaults, and with those of its checkpoint."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from trainkit.config import CfgNode
from trainkit.config.config import changed_settings
from trainkit.config.yaml_files import parse_literal
from trainkit.utils import comm
from trainkit.utils.tables import format_table

# these do not change what is computed; a resumed run does not read MODEL.WEIGHTS
_NO_MATTER = re.compile(
    r"VERSION|OUTPUT_DIR|IMPORTS|STOP_CHECK_PERIOD|REQUEUE_SIGNAL|MODEL\.WEIGHTS|TEST\.EXPECTED_RESULTS|CHECKPOINT\..*"
    r"|LOG\..*|FORK\..*|DATALOADER\.(NUM_WORKERS|PREFETCH_FACTOR|PERSISTENT_WORKERS|TIMEOUT)"
)
# a resumed run takes these from the saved states of random numbers, optimizer and gradient scaler
_OF_CHECKPOINT = re.compile(
    r"SEED|SOLVER\.(BASE_LR|REFERENCE_BATCH_SIZE|MOMENTUM|NESTEROV|WEIGHT_DECAY(_NORM|_BIAS)?|BIAS_LR_FACTOR"
    r"|OPTIMIZER(?!\.NAME).*|PARAM_GROUP.*|AMP\.INIT_SCALE)"
)


def changes_since(cfg: CfgNode, former: CfgNode) -> list[tuple[str, Any, Any]]:
    """(full key, former value, value) of each setting that changes what a run computes and differs from ``former``."""
    before, counted = dict(changed_settings(former, CfgNode())), settings_of(cfg)
    return [(key, before.get(key), value) for key, value in changed_settings(cfg, former) if key in counted]


def settings_of(cfg: CfgNode) -> dict[str, str]:
    """key -> value as text of the settings that change what a run computes; plus the number of processes or threads."""
    found = {key: repr(value) for key, value in changed_settings(cfg, CfgNode()) if not _NO_MATTER.fullmatch(key)}
    if cfg.SOLVER.get("LOGICAL_RANKS"):  # the number of processes changes nothing
        return {**found, "threads of torch": str(torch.get_num_threads())}
    return {**found, "number of processes": str(comm.get_world_size())}


def describe_other_settings(saved: Mapping[str, str], cfg: CfgNode) -> str:
    """A table of the differences between ``settings_of(cfg)`` and saved settings; empty if there are none."""
    own = settings_of(cfg)
    rows = [
        (key, own.get(key, "-"), saved.get(key, "-"), "checkpoint" if _OF_CHECKPOINT.fullmatch(key) else "this run")
        for key in dict.fromkeys([*own, *saved])
        # parsed: the order of keys may differ, since config.yaml has them in alphabetical order
        if parse_literal(own.get(key, "-")) != parse_literal(str(saved.get(key, "-")))
    ]
    headers = ("setting", "of this run", "in the checkpoint", "what is used")
    return format_table(rows, headers, disable_numparse=True) if rows else ""
