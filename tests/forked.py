"""Commands in processes that are forked from the one of the tests: a new interpreter takes seconds to import torch."""

import logging
import multiprocessing
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch._dynamo  # noqa: F401  # which optimizers import with their first instance
from torch.distributed import TCPStore

from trainkit.utils.logger import close_logger


def script(path: str | Path, *arguments: object) -> Callable[[], Any]:
    """A call that does what ``python path arguments`` does."""

    def call() -> None:
        sys.argv = [str(path), *map(str, arguments)]
        sys.orig_argv = [sys.executable, *sys.argv]
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        runpy.run_path(str(path), run_name="__main__")

    return call


def run_forked(
    call: Callable[[], Any],
    folder: Path,
    environ: Mapping[str, str] | None = None,
    num_ranks: int = 1,
) -> CompletedProcess[str]:
    """The exit code of a process that calls ``call`` in this folder, and what it has printed.

    Several ranks find the variables of torchrun, and the first that fails ends the others.
    """
    # torchrun has such a store too; 0: any port that is free
    store = (
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if num_ranks > 1 else None
    )
    with tempfile.TemporaryDirectory() as printed:
        files = [(f"{printed}/{rank}.out", f"{printed}/{rank}.err") for rank in range(num_ranks)]
        processes = []
        for rank in range(num_ranks):
            of_rank = {} if store is None else _of_torchrun(rank, num_ranks, store.port)
            processes.append(
                start_forked(
                    call, folder, {**os.environ, **(environ or {}), **of_rank}, *files[rank]
                )
            )
        codes = _join(processes)
        out, err = (
            "".join(Path(file).read_text() for file in of_ranks)
            for of_ranks in zip(*files, strict=True)
        )
    return CompletedProcess(call, next((code for code in codes if code), 0), out, err)


def start_forked(
    call: Callable[[], Any], folder: Path, environ: Mapping[str, str], out: str, err: str
) -> ForkProcess:
    """A process that calls ``call`` and prints into these files."""
    process = multiprocessing.get_context("fork").Process(
        target=_main, args=(call, folder, environ, out, err)
    )
    process.start()
    return process


def _of_torchrun(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
    }
    numbers |= {"MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0}
    texts = {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none",
    }
    return {name: str(number) for name, number in numbers.items()} | texts


def _join(processes: list[ForkProcess]) -> list[int]:
    """The exit codes in the order of the ends."""
    codes, left = [], {process.sentinel: process for process in processes}
    while left:
        for sentinel in wait(left):
            process = left.pop(sentinel)
            process.join()
            codes.append(process.exitcode)
            for other in left.values() if process.exitcode else ():
                other.terminate()
    return codes


def _main(
    call: Callable[[], Any], folder: Path, environ: Mapping[str, str], out: str, err: str
) -> None:
    close_logger()
    logging.root.handlers.clear()  # those of pytest
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    call()
