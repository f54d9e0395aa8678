"""The check that a job of `jobs.py` resumes exactly, and the content of the folder of a run."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.same_bits import CLOCK_READING
from trainkit.testing import assert_resumes_exactly

# a clock reading takes more or fewer digits in metrics.json; ids and folders of shards are random; the last two are of
# the command
LEFT_OUT = {"length", "sizes", "id", "origin", "folder", ".metadata", "HOOKS", "run_id"}


def check(job: Any, folder: Path, num_kills: int | None = 3, seed: int = 0) -> None:
    """Kill a job at events that are drawn by ``seed`` (None: at each), and compare; see `assert_resumes_exactly`."""
    assert_resumes_exactly(
        job, folder, num_kills, max_iter=job.max_iter, seed=seed, new_processes=False
    )


def content(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Name -> content of each checkpoint and picture; lines of metrics.json, without clock readings."""
    files = {
        path.name: _flat(torch.load(path, map_location="cpu"))
        for path in sorted(folder.glob("*.pth"))
    }
    files |= {
        str(path.relative_to(folder)): {"": path.read_bytes()}
        for path in sorted(folder.rglob("*.png"))
    }
    file = folder / "metrics.json"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    lines = [
        {name: value for name, value in line.items() if not CLOCK_READING.fullmatch(name)}
        for line in lines
    ]
    return files, [line for line in lines if line.keys() - {"iteration", "epoch"}]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """path -> value of everything in a checkpoint; tensors as bytes."""
    if isinstance(value, dict):
        kept = {
            k: item
            for k, item in value.items()
            if k not in LEFT_OUT and not CLOCK_READING.fullmatch(str(k))
        }
        return {
            k: v for name, item in kept.items() for k, v in _flat(item, f"{path}/{name}").items()
        }
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{path}/{i}").items()}
    if isinstance(value, torch.Tensor):
        # the content of a meta tensor is in shards
        content = None if value.is_meta else value.numpy().tobytes()
        return {path: (value.dtype, tuple(value.shape), content)}
    return {path: repr(value)}
