"""How a run was started, saved in its checkpoints, so that a replay can repeat it and find differences."""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainkit.utils import comm

_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_FACTS = {"commit": "commit of the code", "device": "device", "processes": "number of processes"}


def describe_origin(config: str, device: torch.device | None, batch: Mapping[str, Any] | None) -> dict[str, Any]:
    """Plain values for a checkpoint; once per run, since it reads the project's files and asks git.

    ``config`` is the YAML of the settings as given, ``batch`` says how the samples of an iteration are divided.
    """
    files = {_short(path): digest_of(path) for path in sorted({*_project_files()})}
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return {
        "config": config,
        "argv": [*sys.argv],
        "module": spec.name.removesuffix(".__main__") if spec is not None else "",  # of python -m
        "folder": os.getcwd(),
        "seed": torch.initial_seed(),
        "batch": dict(batch or {}),
        "versions": _versions(),
        "device": _name_of(device),
        "processes": comm.get_world_size(),
        "commit": _commit(os.getcwd()),
        "files": {"trainkit": _digest_of_trainkit(), **files},
    }


def describe_other_origin(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """A line for each difference to the saved origin, except the config."""
    lines = [
        f"{name}: {saved.get(key)} in the run, {own.get(key)} now"
        for key, name in _FACTS.items()
        if saved.get(key) != own.get(key)
    ]
    for name, version in saved["versions"].items():
        if own["versions"].get(name) != version:
            lines.append(f"version of {name}: {version} in the run, {own['versions'].get(name)} now")
    for name, digest in saved["files"].items():
        file = Path(saved["folder"], name)
        if name == "trainkit":
            here = _digest_of_trainkit()
        else:
            here = digest_of(file) if file.exists() else ""
        if here != digest:
            lines.append(f"code: {name} is {'another one' if here else 'not there'} now")
    return lines


def digest_of(*files: Path) -> str:
    """The digest of the contents of the files, one after the other."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache  # a process may train many times, with the code that it has imported once
def _digest_of_trainkit() -> str:
    return digest_of(*sorted(_own().rglob("*.py")))


def _project_files() -> Iterator[Path]:
    """Files of the imported modules, without installed packages and trainkit."""
    left_out = (str(_own()) + os.sep, sysconfig.get_path("stdlib") + os.sep)
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if (
            not isinstance(file, str)
            or not file.endswith(".py")
            or _INSTALLED.search(file)
            or file.startswith(left_out)
        ):
            continue
        path = Path(file).resolve()
        if path.is_file():
            yield path


def _own() -> Path:
    return Path(__file__).resolve().parents[1]


def _short(path: Path) -> str:
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


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


@cache  # cached for the same reason
def _commit(folder: str) -> str:
    """The commit of a folder's git repository; "" if there is none."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
