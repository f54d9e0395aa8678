"""``--preflight``: check the job instead of training it; and the keys of the config that are read."""

import argparse
import atexit
import os
import shlex
import shutil
import sys
import tempfile
from typing import Any

from trainkit.config import CfgNode, ConfigError
from trainkit.utils import comm

reads: dict[str, None] = {}  # full keys that were read


class RecordedCfg(CfgNode):
    """Adds the keys that are read to `reads`.

    The key of the node itself is in its ``__dict__``, because an attribute of a node is a key.
    """

    def _note(self, name: str) -> None:
        prefix = self.__dict__.get("__key__", "")
        reads[f"{prefix}{name}"] = None

    def __getitem__(self, name: str) -> Any:  # an attribute is read by it too
        self._note(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)


def record_reads(node: CfgNode, key: str = "") -> None:
    """Let a config note its reads from now on. The script holds this object, so it cannot be another one."""
    for name, value in node.items():
        if isinstance(value, CfgNode):
            record_reads(value, f"{key}{name}.")
    object.__setattr__(node, "__class__", RecordedCfg)  # the node may be frozen
    node.__dict__["__key__"] = key


def apply(cfg: Any, args: argparse.Namespace) -> None:
    """Let the trainer of this config check the job before its first step, in a temporary folder."""
    if getattr(args, "fast_dev_run", False):  # as in the new processes that a check starts
        return
    if not isinstance(cfg, CfgNode) or args.eval_only:
        raise ConfigError("--preflight is for a job with a config of get_cfg that trains")
    json_folder = os.path.dirname(os.path.abspath(args.preflight_json))
    if not os.path.isdir(json_folder):
        raise ConfigError(f"--preflight-json: there is no folder for {args.preflight_json!r}")
    record_reads(cfg)
    command = args.preflight or args.preflight_quick
    if command is True:  # arguments that were made by hand
        command = shlex.join(sys.orig_argv)
    arguments = {**vars(args), "preflight_command": command}
    hook = {"NAME": "Preflight", "GIVEN": cfg.clone(), "ARGS": arguments}
    cfg["HOOKS"] = [*cfg.HOOKS, hook]
    folder = tempfile.mkdtemp(prefix="preflight-") if comm.is_main_process() else ""
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder = comm.broadcast(folder)
    cfg["OUTPUT_DIR"] = folder
    cfg.CHECKPOINT["DIR"] = folder
    cfg["SEED"] = max(cfg.SEED, 0)
    cfg.LOG["LEVEL"] = "ERROR"
    cfg.LOG["WRITERS"] = []
