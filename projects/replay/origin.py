"""How a run was started: the facts in a checkpoint with which a replay repeats it."""

import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from trainkit.projects.replay.project import Project

from trainkit.utils import comm

logger = logging.getLogger(__name__)

active_replay: ContextVar[Any] = ContextVar("active_replay", default=None)
"""The `Session` of this process."""

# errors of `peek_file`, or of reading its result, if the file is not a checkpoint of a trainer
UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError)
_FACTS = {"commit": "commit of the code", "device": "device", "processes": "number of processes"}
_THREADS = "threads of torch"
# environment variables that change numbers; the number of threads is a fact of its own
_ENVIRONMENT = re.compile(r"(OMP|MKL|CUBLAS|TORCH)_(?!NUM_THREADS).*|ATEN_CPU_CAPABILITY|PYTHONHASHSEED|NCCL_ALGO")


class Saved(NamedTuple):
    """A checkpoint. A run continues from it with ``stage`` of ``iteration``; in stage 1 the update is not done."""

    iteration: int
    stage: int
    path: str
    state: Mapping[str, Any]


def peek_file(path: str | os.PathLike[str]) -> Any:
    """The content of a checkpoint, not verified. The file is memory-mapped: only entries that are used are read."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def checkpoints_with_origin(paths: Iterable[str]) -> Iterator[Saved]:
    """The checkpoints that say how their run was started; they are not verified."""
    for path in paths:
        try:
            state = peek_file(path)
            trainer = state["trainer"]
            done, stage = trainer["iteration"], trainer["position"]["stage"]
            if trainer["origin"]:
                yield Saved(done + (stage == 1), stage, path, state)
        except UNREADABLE as error:
            logger.info("%s does not say how its run was started: %s", path, error)


def describe_origin(config: str, device: torch.device | None, batch: Mapping[str, Any] | None) -> dict[str, Any]:
    """How this run was started, as plain values for a checkpoint; call it once per run: it reads files and asks git.

    ``config`` is the YAML of the settings as given, ``batch`` says how the samples of an iteration are divided.
    """
    project = Project()
    files = {name: digest_of(project.folder / name) for name in _project_files(project)}
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return {
        "config": config,
        "argv": [*sys.argv],
        "module": spec.name.removesuffix(".__main__") if spec is not None else "",  # the module of python -m
        "folder": os.getcwd(),
        "seed": torch.initial_seed(),
        "batch": dict(batch or {}),
        **_facts(device),
        "files": {"trainkit": _digest_of_trainkit(), **files},
    }


def _facts(device: torch.device | None) -> dict[str, Any]:
    return {
        "versions": _versions(),
        "device": _name_of(device),
        "processes": comm.get_world_size(),
        "commit": _commit(os.getcwd()),
        "machine": _machine(),
    }


def _machine() -> dict[str, str]:
    """What changes the bits of a computation besides code and versions, as text by name."""
    facts: dict[str, Any] = {
        _THREADS: torch.get_num_threads(),
        "threads of torch between operations": torch.get_num_interop_threads(),
        "instructions of the CPU": torch.backends.cpu.get_cpu_capability(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
    }
    facts |= {f"variable {name}": value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)}
    return {name: str(value) for name, value in facts.items()}


def threads_of(origin: Mapping[str, Any]) -> int:
    """The number of threads of the run; 0 if the checkpoint does not say it."""
    number = origin.get("machine", {}).get(_THREADS, "")
    return int(number) if number.isdecimal() and 0 < int(number) < 1025 else 0


def describe_other_origin(saved: Mapping[str, Any], device: torch.device | None) -> list[str]:
    """A line for each difference between the saved origin and this process, except the config."""
    own = _facts(device)
    pairs = {name: (saved.get(key), own[key]) for key, name in _FACTS.items()}
    for name, version in saved["versions"].items():
        pairs[f"version of {name}"] = version, own["versions"].get(name)
    if "machine" in saved:  # older files have no such facts
        for name in {**saved["machine"], **own["machine"]}:
            pairs[name] = saved["machine"].get(name, "not set"), own["machine"].get(name, "not set")
    lines = [f"{name}: {former} in the run, {now} now" for name, (former, now) in pairs.items() if former != now]
    project = Project()
    for name, digest in saved["files"].items():
        file = project.folder / name
        is_there = project.relative(file) == name
        leads_out = os.path.isabs(name) or ".." in Path(name).parts or (os.path.lexists(file) and not is_there)
        if name != "trainkit" and (leads_out or not name.endswith(".py")):
            continue  # a path that leads out of the project, or no file of code
        here = _digest_of_trainkit() if name == "trainkit" else digest_of(file) if is_there else ""
        if here != digest:
            lines.append(f"code: {name} is {'another one' if here else 'not there'} now")
    return lines


def digest_of(*files: Path) -> str:
    """The digest of the contents of the files, one after the other."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache  # cached: a process may train many times, but it imports the code only once
def _digest_of_trainkit() -> str:
    return digest_of(*sorted(_own().rglob("*.py")))


def _project_files(project: Project) -> list[str]:
    """The files of the imported modules that are in the project, except trainkit, relative to its folder."""
    files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    left_out = str(_own()) + os.sep
    python = [name for name in files if isinstance(name, str) and name.endswith(".py")]
    return sorted({project.relative(name) for name in python if not name.startswith(left_out)} - {""})


def _own() -> Path:
    return Path(comm.__file__).resolve().parents[1]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    versions |= {"trainkit": sys.modules["trainkit"].__version__, "CUDA of torch": str(torch.version.cuda)}
    for name in ("torchvision", "fvcore"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _name_of(device: torch.device | None) -> str:
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "none" if device is None else device.type


@cache  # cached, since the imported code does not change
def _commit(folder: str) -> str:
    """The commit of a folder's git repository; "" if there is none."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
