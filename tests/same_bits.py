#!/usr/bin/env python
"""Record the bits of twelve small jobs, and compare them after a change of the code.

::

    python tests/same_bits.py record bits.json                    # before the change; about two minutes
    python tests/same_bits.py compare bits.json                   # after it: trains again; exit code 1 if bits differ
    python tests/same_bits.py compare bits.json --only digits gan

The file has three SHA-256 for each job: of the weights, of the optimizer's tensors, and of metrics.json without clock
readings. The jobs are command lines and config keys, so they stay the same when code moves; ``resumed`` has the bits of
``digits``. Compare only on the machine and with the version of torch of the record: others give other bits.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.differences import read_whole

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("weights", "optimizer", "metrics")
CLOCK_READING = re.compile(
    r"(rank_data_|data_|epoch_)?time|eta_seconds|mfu_pct|.*_(per_sec|sec|mib)|.*memory.*"
)


EXIT_CODE = 9  # of ExitAt
EXIT = (
    "IMPORTS",
    ["projects.digits", "tests.same_bits_jobs"],
    "HOOKS",
    [{"NAME": "ExitAt", "AT": 40}],
)
COMMON = ("MODEL.DEVICE", "cpu", "LOG.WRITERS", ["json"], "LOG.PERIOD", 10, "SEED", 0)
LENGTHS = (
    "SOLVER.MAX_ITER",
    60,
    "SOLVER.WARMUP_ITERS",
    10,
    "SOLVER.CHECKPOINT_PERIOD",
    25,
    "TEST.EVAL_PERIOD",
    20,
)
SHORT = (
    "SOLVER.MAX_ITER",
    12,
    "SOLVER.WARMUP_ITERS",
    4,
    "TEST.EVAL_PERIOD",
    6,
    "TEST.MAX_BATCHES",
    2,
)
CLIP = ("SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "full_model")
EMA = ("HOOKS", [{"NAME": "EMAHook", "DECAY": 0.9, "EVALUATE": "ema"}])
LAZY = ("train.device=cpu", "train.max_iter=60", "train.log_period=10", "train.eval_period=20")


def train(project: str, *options: Any, flags: tuple[str, ...] = ()) -> list[str]:
    """A command; ``{folder}`` stands for the folder of the run."""
    config = str(ROOT / "projects" / project / "config.yaml")
    keys = ["OUTPUT_DIR", "{folder}", *map(str, (*COMMON, *options))]
    return [str(ROOT / "tools/train_net.py"), "--config-file", config, *flags, *keys]


def digits(*options: Any, flags: tuple[str, ...] = ()) -> list[str]:
    return train("digits", *LENGTHS, *options, flags=flags)


# name -> commands that run one after the other
JOBS: dict[str, list[list[str]]] = {
    "digits": [digits()],
    "charlm": [train("charlm", *SHORT)],
    "segmentation": [train("segmentation", *SHORT, "SOLVER.SCHEDULES", [])],
    "gan": [["-m", "tests.same_bits_jobs", "{folder}"]],
    "amp": [digits("SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16")],
    "accumulation": [
        digits("SOLVER.ACCUMULATION_STEPS", 4, *CLIP, "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 0.5)
    ],
    "ema": [digits(*EMA)],
    "two_ranks": [digits(flags=("--num-gpus", "2"))],
    "fsdp": [digits("MODEL.PARALLEL", "fsdp", flags=("--num-gpus", "2"))],
    "logical_ranks": [digits("SOLVER.LOGICAL_RANKS", 4)],
    "lazy": [[str(ROOT / "tools/lazyconfig_train_net.py"), *LAZY, "train.output_dir={folder}"]],
    "resumed": [digits(*EXIT), digits(flags=("--resume",))],
}


def run(name: str, folder: Path) -> dict[str, str]:
    """Train a job in the folder; returns the digest of each of its parts.

    Raises:
        RuntimeError: a command ends with another exit code than it should.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    for command in JOBS[name]:
        arguments = [sys.executable, *(word.replace("{folder}", str(folder)) for word in command)]
        done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode != (EXIT_CODE if "ExitAt" in str(command) else 0):
            raise RuntimeError(
                f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            )
    return digests(folder)


def digests(folder: Path) -> dict[str, str]:
    """Of the final checkpoint and metrics.json of a run.

    Raises:
        ValueError: a part is empty, so its digest would say nothing.
    """
    state = read_whole(str(folder / "model_final.pth"))
    lines = (folder / "metrics.json").read_text().splitlines()
    contents = {
        "weights": [*lines_of_tensors(state["model"])],
        "optimizer": [line for entry in optimizers(state) for line in lines_of_tensors(entry)],
        "metrics": [line for line in map(without_clock, lines) if line],
    }
    if empty := [part for part in PARTS if not contents[part]]:
        raise ValueError(f"{folder} has no {' and no '.join(empty)}")
    return {part: hashlib.sha256("\n".join(contents[part]).encode()).hexdigest() for part in PARTS}


def optimizers(state: Mapping[Any, Any]) -> Iterator[Any]:
    """The entries called "optimizer" or "optimizers", wherever they are, but not within the model."""
    for key in sorted(state, key=str):
        if key in ("optimizer", "optimizers"):
            yield state[key]
        elif key != "model" and isinstance(state[key], Mapping):
            yield from optimizers(state[key])


def lines_of_tensors(state: Any, name: str = "") -> Iterator[str]:
    """Name, type, shape and digest of the bytes of each tensor in nested values, sorted by name."""
    if isinstance(state, Tensor):
        content = state.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield f"{name} {state.dtype} {[*state.shape]} {hashlib.sha256(content).hexdigest()}"
    elif isinstance(state, Mapping | list | tuple):
        entries = state.items() if isinstance(state, Mapping) else enumerate(state)
        for key, value in sorted(entries, key=lambda entry: str(entry[0])):
            yield from lines_of_tensors(value, f"{name}/{key}")


def without_clock(line: str) -> str:
    """A line of metrics.json without clock readings; "" if it had nothing else."""
    values = {
        key: value for key, value in json.loads(line).items() if not CLOCK_READING.fullmatch(key)
    }
    return json.dumps(values, sort_keys=True) if values.keys() - {"iteration"} else ""


def main(args: argparse.Namespace) -> int:
    """Record or compare; returns the exit code."""
    recorded = json.loads(args.file.read_text()) if args.action == "compare" else {}
    names = args.only or [name for name in JOBS if name in recorded or args.action == "record"]
    if missing := [name for name in names if args.action == "compare" and name not in recorded]:
        raise SystemExit(f"{args.file} has no record of {', '.join(missing)}")
    print(f"{'job':15}" + "".join(f"{part:12}" for part in PARTS), flush=True)
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = run(name, Path(folder))
        words = {part: digest[:10] for part, digest in found[name].items()}
        if args.action == "compare":
            words = {
                part: "same" if found[name][part] == recorded[name][part] else "DIFFERENT"
                for part in PARTS
            }
        print(f"{name:15}" + "".join(f"{words[part]:12}" for part in PARTS), flush=True)
    if args.action == "record":
        args.file.write_text(json.dumps(found, indent=1) + "\n")
    return int(args.action == "compare" and any(found[name] != recorded[name] for name in names))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--only", nargs="+", choices=list(JOBS), metavar="NAME", help="these jobs; default: all"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # instead of tests/, which has a package tools too
    sys.exit(main(parse_args()))
