"""Whether the tests on the fake device notice 30 faults of the code for GPUs.

::

    python -m tests.fake_cuda.mutants              # all; about ten minutes
    python -m tests.fake_cuda.mutants autocast     # those whose name has this word

A mutant is a text that replaces another one, in a copy of the tree. It is killed if a test of its files fails. The exit
code is 0 if all are killed. A text that is no longer in the source is an error: change the mutant with the code.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.fake_cuda.build import build

ROOT = Path(__file__).resolve().parents[2]

RACES, TRAINERS, WAITS = (f"tests/fake_cuda/test_on_{name}.py" for name in ("races", "trainers", "waits"))
AHEAD, GRAPH = "tests/engine/test_cuda.py", "projects/graph/tests/test_graph.py"
NON_FINITE, COPIES = "projects/non_finite/tests/test_non_finite.py", "projects/hooks/tests/test_copy_ahead.py"

# file -> (name, text, its replacement, test file) of each mutant
MUTANTS = {
    "trainkit/engine/metrics.py": [
        (
            "the host runs ahead without a limit",
            "self._recent.popleft().synchronize()",
            "self._recent.popleft()",
            AHEAD,
        ),
    ],
    "trainkit/utils/events/worker.py": [
        ("numbers are read before they have arrived", "arrived.synchronize()", "pass", WAITS),
        ("numbers are copied into pageable memory", ', device="cpu", pin_memory=True)', ', device="cpu")', WAITS),
        ("pinned memory on the default device", ', device="cpu", pin_memory=True)', ", pin_memory=True)", TRAINERS),
    ],
    "trainkit/utils/device.py": [
        (
            "an event on a stream of another device",
            "event.record(torch.accelerator.current_stream(device))",
            "event.record()",
            WAITS,
        ),
        ("the copies of a batch block", "non_blocking=runs_ahead(device)", "non_blocking=False", WAITS),
    ],
    "trainkit/data/build.py": [
        (
            "the loader does not pin its memory",
            "pin_memory=pin_memory and accelerator_runs_ahead()",
            "pin_memory=False",
            WAITS,
        ),
    ],
    "trainkit/engine/feed.py": [
        ("batches are not copied ahead", "self.move(batch, device)", "move_to_device(batch, device)", RACES),
    ],
    "trainkit/engine/amp.py": [
        ("autocast is left out", "with torch.autocast(self._device_type, dtype=self.precision):", "if True:", TRAINERS),
        ("autocast is always float16", "dtype=self.precision)", "dtype=torch.float16)", TRAINERS),
        (
            "the update is not that of the scaler",
            "self.grad_scaler.step(self.optimizer)",
            "self.optimizer.step()",
            TRAINERS,
        ),
        (
            "the scale is not copied before it changes",
            "self.grad_scaler._get_scale_async()).clone()",
            "self.grad_scaler._get_scale_async())",
            TRAINERS,
        ),
        (
            "momentum is not prepared for a skipped update",
            "            prepare_to_skip(optimizer)",
            "            pass",
            TRAINERS,
        ),
    ],
    "projects/hooks/copy_ahead.py": [
        ("the computation does not wait for the copy", "current.wait_stream(self._stream)", "pass", RACES),
        ("the memory of a batch is free during the computation", "leaf.record_stream(current)", "pass", RACES),
        ("batches are copied on the stream of the computation", "with self._stream:", "if True:", COPIES),
    ],
    "projects/async_save/host_copy.py": [
        ("a copy is written before it has arrived", "arrival.synchronize()", "pass", TRAINERS),
        (
            "the copy of a state blocks",
            "non_blocking=pinned",
            "non_blocking=False",
            WAITS,
        ),
    ],
    "trainkit/checkpoint/checkpointer.py": [
        (
            "a save takes the memory of one under way",
            "            self.wait()\n        state",
            "            pass\n        state",
            TRAINERS,
        ),
    ],
    "projects/non_finite/trainers.py": [
        (
            "the flag is not given to the optimizer",
            "optimizer.grad_scale, optimizer.found_inf = None, flag",
            "optimizer.grad_scale, optimizer.found_inf = None, torch.zeros_like(flag)",
            TRAINERS,
        ),
        ("a skipped step changes the buffers", "if name in self._former_buffers:", "if False:", TRAINERS),
        ("the flag is read by the host", "elif not skips_on_device(self.optimizer):", "elif True:", NON_FINITE),
    ],
    "projects/logical_ranks/trainer.py": [
        (
            "means are sorted by a list of places",
            "tree_sum(torch.stack(ascending))",
            "tree_sum(torch.stack(ascending)[[*range(len(ascending))]])",
            WAITS,
        ),
    ],
    "projects/graph/recorder.py": [
        ("no thread may call CUDA during a recording", '"thread_local"', '"global"', GRAPH),
        ("the memory pool of recordings is not kept", "self._newest = graph", "pass", GRAPH),
        ("ordinary steps do not wait for the batch", "self._stream.wait_stream(current)", "pass", RACES),
        ("nobody watches for waits before a recording", 'torch.cuda.set_sync_debug_mode("warn")', "pass", GRAPH),
    ],
    "projects/graph/trainer.py": [
        ("a recording after one ordinary step", "WARM_UP_ITERS = 3", "WARM_UP_ITERS = 1", GRAPH),
        (
            "changed settings of the optimizer are not noticed",
            "        *map(itemgetter.__call__, trainer._settings, groups),\n",
            "",
            GRAPH,
        ),
        (
            "losses are not copied before the next replay",
            "self._packed.clone().unbind()",
            "self._packed.unbind()",
            GRAPH,
        ),
    ],
}


def is_killed(copy: Path, file: str, old: str, new: str, tests: Iterable[str]) -> bool:
    path = copy / file
    source = path.read_text()
    if old and source.count(old) != 1:
        sys.exit(f"{file} has {source.count(old)} times the text {old!r}; accepted: once")
    path.write_text(source.replace(old, new) if old else source)
    environment = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'projects'}", "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-p", "tests.fake_cuda.device", "-p", "no:xdist", "-p", "no:cacheprovider", f"--basetemp={copy / 'tmp'}"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "cuda", *options, *tests]
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=900)
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(source)
    return done.returncode != 0


def main() -> int:
    word = " ".join(sys.argv[1:])
    chosen = [(file, *mutant) for file, mutants in MUTANTS.items() for mutant in mutants if word in mutant[0]]
    with tempfile.TemporaryDirectory() as folder:
        if "FAKE_CUDA" not in os.environ:
            os.environ["FAKE_CUDA"] = str(build(Path(folder)))
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "output", "build"))
        if is_killed(copy, "setup.py", "", "", {mutant[-1] for mutant in chosen}):
            sys.exit("the tests fail without a mutant")
        killed = []
        for file, name, old, new, tests in chosen:
            killed.append(is_killed(copy, file, old, new, [tests]))
            print("killed  " if killed[-1] else "SURVIVED", name, flush=True)
    print(f"{sum(killed)} of {len(chosen)} mutants are killed")
    return 0 if all(killed) else 1


if __name__ == "__main__":
    sys.exit(main())
