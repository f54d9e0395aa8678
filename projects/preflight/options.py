"""``--preflight``: check the job instead of training it."""

import argparse
import os
import tempfile
from typing import Any

from trainkit.projects.preflight.reads import record_reads

from trainkit.config import CfgNode, ConfigError
from trainkit.utils import comm

INSIDE = "TRAINKIT_PREFLIGHT"  # a variable of the environment: in such a process the options do nothing


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    text = "check the job instead of training it; exit code 0: sound, 3: findings"
    parser.add_argument("--preflight", action="store_true", help=text)
    parser.add_argument("--preflight-quick", action="store_true", help="the same, without new processes")
    parser.add_argument("--preflight-allow", action="append", default=[], metavar="NAME", help="accept this finding")
    parser.add_argument("--preflight-json", default="", metavar="FILE", help="write the findings to FILE too")


def apply(cfg: Any, args: argparse.Namespace) -> None:
    """Let the trainer of this config check the job before its first step, in a temporary folder."""
    if INSIDE in os.environ:
        return
    if not isinstance(cfg, CfgNode) or args.eval_only:
        raise ConfigError("--preflight is for a job with a config of get_cfg that trains")
    options = {"GIVEN": cfg.dump(), "QUICK": args.preflight_quick, "ALLOW": args.preflight_allow}
    cfg["HOOKS"] = [*cfg.HOOKS, {"NAME": "Preflight", **options, "JSON": args.preflight_json}]
    folder = comm.broadcast(tempfile.mkdtemp(prefix="preflight-") if comm.is_main_process() else "")
    cfg["OUTPUT_DIR"] = cfg.CHECKPOINT["DIR"] = folder
    cfg["SEED"], cfg.LOG["LEVEL"] = max(cfg.SEED, 0), "ERROR"
    record_reads(cfg)
