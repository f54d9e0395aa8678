"""A run that is killed at any event and resumed ends as one that ran through: the machine that tests it.

A *job* builds a trainer for a folder and trains it. An *event* is a call of a hook point, of a spy before or after all
other hooks. The machine trains a job once, and keeps its folder as it was at every event: what a kill would leave. From
such a folder it resumes with another random state, and compares everything that the checkpoints hold, metrics.json, and
the calls of the hooks with the random numbers that they draw.
"""

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tests.same_bits import CLOCK_READING
from trainkit.engine import HookBase, TrainerBase
from trainkit.engine.hook_base import EPOCH_POINTS, HOOK_POINTS
from trainkit.utils import comm
from trainkit.utils.env import seed_all_rng

# a clock reading takes more or fewer digits in metrics.json; ids and folders of shards are random; the last two are of
# the command
LEFT_OUT = {"length", "sizes", "id", "origin", "folder", ".metadata", "HOOKS", "run_id"}
# a resumed run may make these calls once more
AGAIN = {
    "before_train",
    "after_load",
    "before_save",
}
# others may be repeated
DRAWS = {
    "before_epoch",
    "before_step",
    "after_backward",
    "after_step",
    "after_epoch",
}


class Job(Protocol):
    """A kind of run."""

    has_epochs: bool

    def build(self, folder: Path) -> TrainerBase:
        """A trainer that has loaded the newest checkpoint of the folder, if there is one."""

    def train(self, trainer: TrainerBase) -> None: ...


class Run(NamedTuple):
    """What a run did and left."""

    calls: list[tuple[Any, ...]]  # (spy, point, iteration, arguments, random number) of each event
    files: dict[str, Any]  # name -> content of each checkpoint and picture
    metrics: list[dict[str, Any]]  # lines of metrics.json


class Spy(HookBase):
    """Notes each call, and keeps the folder as it is then."""

    def __init__(
        self, name: str, calls: list[tuple[Any, ...]], folder: Path, kept: Path | None, epochs: bool
    ) -> None:
        self.calls, self.folder, self.kept, self.name = calls, folder, kept, name
        self.before: int | None = None  # the number of events before the checkpoint that was loaded
        for point in HOOK_POINTS if epochs else sorted({*HOOK_POINTS} - {*EPOCH_POINTS}):
            setattr(self, point, lambda *arguments, point=point: self.note(point, arguments))

    def note(self, point: str, arguments: tuple[Any, ...]) -> None:
        if self.kept is not None and comm.is_main_process():
            _copy(self.folder, self.kept / str(len(self.calls)))
        drawn = (
            random.random() + np.random.rand() + torch.rand(()).item() if point in DRAWS else None
        )
        words = tuple(item for item in arguments if isinstance(item, str | int))
        self.calls.append((self.name, point, self.trainer.iter, words, drawn))

    def state_dict(self) -> dict[str, Any]:
        return {"before": len(_once(self.calls)) + (self.before or 0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = state_dict["before"]


def train(job: Job, folder: Path, seed: int, kept: Path | None = None) -> tuple[Run, int | None]:
    """Train a job in a folder, which may hold the first part of its run.

    Returns:
        The run, and the number of events before the checkpoint with which it went on; None: it started anew.
    """
    seed_all_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    calls: list[tuple[Any, ...]] = []
    trainer = job.build(folder)
    first, last = (Spy(name, calls, folder, kept, job.has_epochs) for name in ("first", "last"))
    trainer.register_hooks([first], priority="HIGHEST")
    trainer.register_hooks([last], priority="LOWEST")
    before = first.before
    job.train(trainer)
    comm.synchronize()
    return Run(calls, *content(folder)), before


def check(job: Job, folder: Path, num_kills: int | None = 3, seed: int = 0) -> None:
    """Kill the job at ``num_kills`` events, drawn by ``seed`` (None: at all), and compare each resumed run."""
    whole, _ = train(job, folder / "whole", 1, folder / "kept")
    events = [
        event
        for event in range(len(whole.calls))
        if (folder / "kept" / str(event) / "last_checkpoint").exists()
    ]
    for event in (
        events if num_kills is None else sorted(random.Random(seed).sample(events, num_kills))
    ):
        where = f"killed at event {event} of {len(whole.calls)}, {whole.calls[event][:4]}"
        part = folder / f"part{event}"
        if comm.is_main_process():
            shutil.copytree(folder / "kept" / str(event), part)
        comm.synchronize()
        run, before = train(job, part, 2 + event)
        assert _once(run.calls) == _once(whole.calls)[before:], where
        assert run.metrics == whole.metrics, where
        assert run.files.keys() == whole.files.keys(), where
        for name, content in whole.files.items():
            other = run.files[name]
            assert [
                key for key in {**content, **other} if content.get(key) != other.get(key)
            ] == [], f"{where}: {name}"


def _once(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [call for call in calls if call[1] not in AGAIN]


def _copy(folder: Path, target: Path) -> None:
    """Copy a folder in which a thread may write meanwhile."""
    target.mkdir(parents=True)
    # it must not be too new
    for file in sorted(folder.iterdir(), key=lambda file: file.name != "last_checkpoint"):
        with contextlib.suppress(FileNotFoundError):  # a file that is renamed
            if file.is_dir():
                shutil.copytree(file, target / file.name)
            elif file.name != "run.lock":
                shutil.copy(file, target)


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
