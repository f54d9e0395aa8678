"""The time of a synchronous save, compared with torch.save; and the time until an asynchronous save returns."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import job
from benchmarks.measure import Row, Runner, alternate, compare
from trainkit.checkpoint import Checkpointer


def save(
    rounds: int = 15, *, scratch: Path, device: str = "cpu", num_layers: int = 24
) -> list[Row]:
    """A save compared with torch.save and fsync of the same state, and an asynchronous with a synchronous save.

    On a GPU, an asynchronous save is timed until the device has finished what the next step has to wait for. There, a
    synchronous save that stages the state is compared with one that does not.

    Args:
        scratch: a folder on the disk to measure; 1 GB is written at a time, and removed.
        num_layers: each has 4 MiB of parameters, and twice that in the optimizer.
    """
    model, optimizer = _trained(num_layers, device)
    plain = scratch / "plain.pth"
    synchronous = Checkpointer(model, scratch / "synchronous", optimizer=optimizer)
    asynchronous = Checkpointer(
        model, scratch / "asynchronous", format="async_save", optimizer=optimizer
    )
    # the copy of this save allocates memory, which later copies use again
    asynchronous.save("first")

    def timed(action: Callable[[], object]) -> Runner:
        def run() -> float:
            asynchronous.wait()
            _empty(scratch)
            _finish(device)
            begin = time.perf_counter()
            action()
            _finish(device)
            return time.perf_counter() - begin

        return run

    runners = {
        "torch.save": timed(
            lambda: _torch_save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, plain
            )
        ),
        "synchronous": timed(lambda: synchronous.save("model")),
        "asynchronous": timed(lambda: asynchronous.save("model")),
    }
    if device != "cpu":
        staged = Checkpointer(model, scratch / "staged", format="staged", optimizer=optimizer)
        staged.save("first")
        runners["staged"] = timed(lambda: staged.save("model"))
    found = alternate(runners, rounds)
    asynchronous.wait()
    _empty(scratch)
    note = f"{12 * num_layers} MiB, {device}"
    goal = 1 / 5 if device == "cpu" else 1 / 20
    rows = [
        compare(
            "stall of an asynchronous save", found, "asynchronous", "synchronous", goal, note=note
        )
    ]
    if device == "cpu":
        rows.append(compare("synchronous save", found, "synchronous", "torch.save", 1.2, note=note))
        rows.append(_save_of_a_job(scratch, 4 * rounds))
    else:
        rows.append(compare("staged save", found, "staged", "synchronous", note=note))
    return rows


def _save_of_a_job(scratch: Path, rounds: int) -> Row:
    """A save of the tiny model with its hooks and 1,000 steps of histories, compared with torch.save of the state.

    It is CPU time of the thread: a save waits for the disk three times, for the file, the tag and the folder.
    """
    with job.one_thread(), job.logging_to(scratch):
        trainer = job.default_trainer(scratch / "job")
        job.Chunks(trainer)(1000)
        state, checkpointer = trainer.checkpointer.collect({}), trainer.checkpointer

        def timed(action: Callable[[], object]) -> Runner:
            def run() -> float:
                begin = time.thread_time()
                action()
                return time.thread_time() - begin

            return run

        runners = {
            "torch.save": timed(lambda: _torch_save(state, scratch / "plain.pth")),
            "Checkpointer": timed(lambda: checkpointer.save("model")),
        }
        found = alternate(runners, rounds)
    _empty(scratch)
    return compare("save of the tiny job", found, "Checkpointer", "torch.save", 1.2)


def _trained(num_layers: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(num_layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _torch_save(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path)
    _sync(path)


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.current_stream().synchronize()


def _empty(folder: Path) -> None:
    """Remove the files of the last round, so that the time of a save does not include freeing their blocks."""
    for path in folder.rglob("*.pth"):
        path.unlink()
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
