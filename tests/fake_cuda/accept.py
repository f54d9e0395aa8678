"""The acceptance run: whether trainkit works on a GPU, and how fast.

::

    python -m tests.fake_cuda.accept                 # all rows, less than 20 minutes on one GPU
    python -m tests.fake_cuda.accept nccl benchmark  # these rows

Each row is a function in a process of its own, since an error of CUDA may end a process. A row is false if its function
raises, and then the exit code is 1. If FAKE_CUDA names a library of `build`, the rows run on the fake device: small,
without speeds, and without those that need a real one.
"""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.engine.tiny import Weight, sgd
from trainkit.config import get_cfg
from trainkit.engine import DefaultTrainer, SimpleTrainer, launch  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
IS_FAKE = "FAKE_CUDA" in os.environ


def python(call):
    """The command of a process that calls a function of this module."""
    start = "import tests.fake_cuda.device\n" if IS_FAKE else ""  # before torch
    return [sys.executable, "-c", f"{start}from tests.fake_cuda import accept\naccept.{call}"]


def all_tests(folder):
    """The tests marked ``cuda``, of all files; those that look into the fake device run only there."""
    files = [path for name in ("tests", "projects") for path in (ROOT / name).rglob("test_*.py")]
    left_out = "" if IS_FAKE else "test_on_waits.py"
    files = sorted(
        str(path) for path in files if "needs_cuda" in path.read_text() and path.name != left_out
    )
    options = [
        "-m",
        "cuda",
        "-rs",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        f"--basetemp={folder / 'tests'}",
    ]
    assert pytest.main([*options, *files]) == 0


def benchmark(folder):
    """The section of ``tools/benchmark.py`` for a GPU."""
    sys.path.insert(0, str(ROOT / "tools"))
    from benchmarks import gpu
    from benchmarks.measure import as_table

    rounds = 1 if IS_FAKE else gpu.ROUNDS
    print(as_table(gpu.measure(rounds, folder, quick=IS_FAKE)))


def gpt(folder, options=()):
    """The model of projects/charlm in bfloat16, with its hooks and its evaluation."""
    cfg = get_cfg()
    cfg.merge_from_file(str(ROOT / "projects/charlm/config.yaml"))
    options += (
        "SOLVER.MAX_ITER",
        6,
        "SOLVER.WARMUP_ITERS",
        1,
        "TEST.MAX_BATCHES",
        1,
        "TEST.IMS_PER_BATCH",
        8,
    )
    options += ("MODEL.DEVICE", "cuda", "SOLVER.AMP.ENABLED", True, "SOLVER.OPTIMIZER.FUSED", True)
    cfg.merge_from_list(["OUTPUT_DIR", str(folder), *options])
    trainer = DefaultTrainer(cfg)
    trainer.train()
    print(f"loss {trainer.storage.latest()['total_loss'][0]:.3f}")


def device_assert(folder):
    """An index out of range ends the process: it does not hang it."""
    done = subprocess.run(python("out_of_range()"), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    print(done.stderr.strip().splitlines()[-1])
    assert done.returncode != 0


def out_of_range():
    model, batches = (
        Weight(lambda weight, batch: weight.expand(4)[batch].sum()).cuda(),
        [torch.tensor([0])] * 5,
    )
    SimpleTrainer(
        model, [*batches, torch.tensor([99])], sgd(model), async_write_metrics=True
    ).train(0, 9)


def nccl(folder):
    """DDP over NCCL with one rank, as torchrun starts it."""
    (folder / "script.py").write_text(
        "from tests.fake_cuda import accept\naccept.launch(accept.one_rank, 1)\n"
    )
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        str(folder / "script.py"),
    ]
    subprocess.run([sys.executable, *command], check=True)


def one_rank():
    model = DistributedDataParallel(Weight(lambda weight, batch: (weight * batch).sum()).cuda())
    SimpleTrainer(model, [torch.ones(2)], sgd(model)).train(0, 5)
    assert "nccl" in torch.distributed.get_backend()


ROWS = {"tests": all_tests, "benchmark": benchmark, "device_assert": device_assert, "gpt": gpt}
ROWS["gpt_graph"] = partial(gpt, options=("SOLVER.GRAPH.ENABLED", True))
ON_GPU = {"nccl": nccl}
for mode in ("default", "reduce-overhead"):
    ON_GPU[f"gpt_{mode}"] = partial(
        gpt, options=("MODEL.COMPILE.ENABLED", True, "MODEL.COMPILE.MODE", mode)
    )


def is_true(name):
    """Run a row; prints the time it took and its last line, or all lines if it is false."""
    start = time.monotonic()
    command = ["timeout", "600", *python(f"run({name!r})")]
    row = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(
        "true " if row.returncode == 0 else "FALSE",
        f"{time.monotonic() - start:4.0f} s",
        name,
        end=": ",
    )
    print(row.stdout if row.returncode else row.stdout.strip().rpartition("\n")[2], flush=True)
    return row.returncode == 0


def run(name):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        (ROWS | ON_GPU)[name](Path(folder))


def main():
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "projects"), os.environ.get("PYTHONPATH", "")]
    )
    print("torch", torch.__version__, "CUDA", torch.version.cuda, flush=True)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    names = sys.argv[1:] or [*ROWS, *([] if IS_FAKE else ON_GPU)]
    return 1 if [name for name in names if not is_true(name)] else 0


if __name__ == "__main__":
    sys.exit(main())
