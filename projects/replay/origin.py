"""How a run was started: its settings and other facts in a checkpoint, and comparisons with those of this process."""

import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trainkit.checkpoint import CheckpointError
from trainkit.config import CfgNode, ConfigError, get_cfg
from trainkit.config.config import changed_settings, get_key
from trainkit.config.defaults import MEANT_IF_SET
from trainkit.config.yaml_files import load_yaml
from trainkit.utils import comm
from trainkit.utils.device import resolve_device
from trainkit.utils.logger import format_table, printable

# these do not change what is computed; a resumed run does not read MODEL.WEIGHTS, and the trainer itself tells of
# NUM_THREADS
_NO_MATTER = re.compile(
    r"VERSION|NUM_THREADS|OUTPUT_DIR|IMPORTS|STOP_CHECK_PERIOD|REQUEUE_SIGNAL|(FIRST_)?STEP_TIMEOUT|MODEL\.WEIGHTS|TEST\.EXPECTED_RESULTS|CHECKPOINT\..*"
    r"|LOG\..*|FORK\..*|DATALOADER\.(NUM_WORKERS|PREFETCH_FACTOR|PERSISTENT_WORKERS|TIMEOUT)"
)
# a resumed run takes these from the saved states of random numbers, optimizer and gradient scaler
_OF_CHECKPOINT = re.compile(
    r"SEED|SOLVER\.(BASE_LR|REFERENCE_BATCH_SIZE|MOMENTUM|NESTEROV|WEIGHT_DECAY(_NORM|_BIAS)?|BIAS_LR_FACTOR"
    r"|OPTIMIZER(?!\.(NAME|FUSED)).*|PARAM_GROUP.*|AMP\.INIT_SCALE)"
)
# environment variables that change numbers; the number of threads is in the state of the trainer
_ENVIRONMENT = re.compile(
    r"(OMP|MKL|CUBLAS|TORCH)_(?!NUM_THREADS).*|ATEN_CPU_CAPABILITY|PYTHONHASHSEED|NCCL_ALGO"
)
# sys.argv of python -c, and of a program from stdin; in a notebook only __main__ has no file
_NO_FILE: tuple[list[str], ...] = ([], [""], ["-"], ["-c"])


def command_of(origin: Mapping[str, Any]) -> str:
    """The command of the run as text, for people: it is never run. Without control characters of a stranger."""
    argv, module = origin.get("argv"), origin.get("module")
    if not isinstance(argv, list) or not argv or not origin.get("has_file", True):
        return "(not known)"
    program = ["-m", module] if module else argv[:1]
    words = ["python", *program, *argv[1:]]
    return printable(shlex.join(map(str, words))).replace("\n", r"\n")


def refuse_imports(names: Iterable[str], given: Iterable[str]) -> None:
    """A file chooses no code: raises ConfigError if its IMPORTS has modules that the user's command does not name."""
    names = [*names]
    if not {*names} <= {*given}:
        text = (
            f"IMPORTS of the run is {names!r:.200}, which your command does not name, and a "
            "file chooses no code"
        )
        raise ConfigError(f'{text}; if you trust it, add to your command: IMPORTS "{names!s:.200}"')


def use_a_device_of_this_machine(cfg: CfgNode, own_device: str) -> None:
    """Set MODEL.DEVICE to that of the command if the device of the run, such as a GPU, is not here."""
    try:
        resolve_device(cfg.MODEL.DEVICE)
    except ValueError:
        cfg.MODEL.DEVICE = own_device


def describe_origin(config: str, device: torch.device | None) -> dict[str, Any]:
    """How this run was started, as plain values for a checkpoint; ``config`` is the YAML of the settings as given."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    module = ""
    if spec is not None:  # python -m
        module = spec.name.removesuffix(".__main__")
    return {
        "config": config,
        "argv": [*sys.argv],
        "module": module,
        "has_file": hasattr(main, "__file__") and sys.argv[:1] not in _NO_FILE,
        "folder": os.getcwd(),
        "seed": torch.initial_seed(),
        "facts": _facts(device),
        "files": _files(),
    }


def describe_other_origin(saved: Mapping[str, Any], device: torch.device | None) -> list[str]:
    """A line for each difference between the saved origin and this process, except the config.

    No path in the file is opened: it is looked up among the files that this process has imported.
    """
    own = describe_origin("", device)
    then = saved["facts"]
    now = own["facts"]
    lines: list[str] = []
    for name in then | now:
        if then.get(name) != now.get(name):
            in_the_run = then.get(name, "not set")
            lines.append(f"{name}: {in_the_run} in the run, {now.get(name, 'not set')} now")
    for name, digest in saved["files"].items():
        if name not in own["files"]:
            lines.append(f"code: {name} is not imported now")
        elif own["files"][name] != digest:
            lines.append(f"code: {name} is another one now")
    return lines


def _facts(device: torch.device | None) -> dict[str, Any]:
    """What changes the bits of a computation besides settings and code, by name."""
    try:
        precision = torch.get_float32_matmul_precision()
    # somebody has set torch's newer name, beside which the older one cannot be read
    except RuntimeError:
        precision = torch.backends.cuda.matmul.fp32_precision
    if device is None:
        device_name = "none"
    elif device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    else:
        device_name = device.type
    facts = {
        "commit of the code": _commit(os.getcwd()),
        "device": device_name,
        "number of processes": comm.get_world_size(),
        "version of python": platform.python_version(),
        "version of torch": str(torch.__version__),
        "version of trainkit": sys.modules["trainkit"].__version__,
        "version of CUDA of torch": str(torch.version.cuda),
    }
    for name in ("numpy", "torchvision", "fvcore"):
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[f"version of {name}"] = importlib.metadata.version(name)
    facts |= {
        "threads of torch between operations": torch.get_num_interop_threads(),
        "instructions of the CPU": torch.backends.cpu.get_cpu_capability(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "precision of float32 products": precision,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
    }
    for name, value in os.environ.items():
        if _ENVIRONMENT.fullmatch(name):
            facts[f"variable {name}"] = value
    return facts


def _files() -> dict[str, str]:
    """The digests of the imported modules of the project, by their paths in the current folder; all of trainkit is one.

    Modules that only a loader worker has imported are not there.
    """
    here = Path.cwd()
    own = Path(comm.__file__).resolve().parents[1]
    found = {"trainkit": _digest_of(*sorted(own.rglob("*.py")))}
    for module in [*sys.modules.values()]:
        file = Path(str(getattr(module, "__file__", None)))
        if not file.is_relative_to(here) or file.is_relative_to(own):
            continue
        if file.suffix == ".py" and "site-packages" not in file.parts and file.is_file():
            name = str(file.relative_to(here))
            found[name] = _digest_of(file)
    return dict(sorted(found.items()))


def sizes_and_times(names: Iterable[str]) -> dict[str, list[int]]:
    """Size and time of the last change (ns) of each file, by its path; other names are left out."""
    found = {}
    for name in names:
        with suppress(OSError, ValueError):
            stat = os.stat(name)
            found[name] = [stat.st_size, stat.st_mtime_ns]
    return found


@cache  # cached: a process may train many times, but it imports the code only once
def _digest_of(*files: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _commit(folder: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5
        )
        return found.stdout.strip()  # "" if it is no repository
    return ""


def changes_since(cfg: CfgNode, former: CfgNode) -> list[tuple[str, Any, Any]]:
    """(full key, former value, value) of each setting that changes what a run computes and differs from ``former``."""
    changes = []
    for key, value in changed_settings(cfg, former):
        if not _NO_MATTER.fullmatch(key):
            changes.append((key, get_key(former, key), value))
    return changes


def use_settings(cfg: CfgNode, config: str, name: str) -> None:
    """Merge the settings of a run, its config as YAML, into ``cfg``; ``name`` is that of the run in errors."""
    # a key that is not in the text was not set in the run, and must not be set here either
    cfg.merge_from_other_cfg(get_cfg())
    cfg.merge_from_other_cfg(load_yaml(config, name))


def settings_of(config: str) -> dict[str, Any]:
    """key -> value of each setting in a config, given as YAML, that changes what a run computes."""
    return {key: value for key, _, value in changes_since(CfgNode.load_cfg(config), CfgNode())}


def table_of_other_settings(saved: Mapping[str, Any], cfg: CfgNode) -> str:
    """A table of the settings of ``cfg`` that differ from those in an origin, and what is used; "" if none."""
    own = settings_of(cfg.dump())
    try:
        of_checkpoint = settings_of(saved["config"])
    except ConfigError as error:  # not one of this run's config
        raise CheckpointError(f"the config in the checkpoint cannot be read: {error}") from error
    rows = []
    for key in own | of_checkpoint:
        # only one of the two may know a key of a project: the other has its default
        here = repr(own[key]) if key in own else _default(key)
        there = repr(of_checkpoint[key]) if key in of_checkpoint else _default(key)
        if here != there:
            used = "checkpoint" if _OF_CHECKPOINT.fullmatch(key) else "this run"
            rows.append((key, here, there, used))
    if not rows:
        return ""
    titles = ("setting", "of this run", "in the checkpoint", "what is used")
    return format_table(rows, titles, disable_numparse=True)


def _default(key: str) -> str:
    """The default of a key as text; "-" if there is no such key, or its project is not there."""
    value: Any = get_cfg()
    for name in key.split("."):
        if name not in value:
            return "-"
        value = value[name]
    default = repr(value)
    # a config in which it is not set means something else than one in which it is set to the default
    return f"{default}, not set" if key in MEANT_IF_SET else default
