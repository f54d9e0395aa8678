"""Whether the tests on the fake device notice 39 faults of the code for GPUs.

::

    python -m tests.fake_cuda.mutants              # all; about ten minutes
    python -m tests.fake_cuda.mutants autocast     # those whose name has this word

A mutant is a text that replaces another one, in a copy of the tree. It is killed if a test of its file fails. The exit
code is 0 if all are killed. A text that is no longer in the source is an error: change the mutant with the code.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from tests.fake_cuda.build import build
from tests.mutation import LEFT_OUT, ROOT

FILES = {name: f"tests/fake_cuda/test_on_{name}.py" for name in ("races", "trainers", "waits")} | {
    "ahead": "tests/engine/test_cuda.py",
    "graph": "projects/graph/tests/test_graph.py",
    "not finite": "projects/non_finite/tests/test_non_finite.py",
    "copies": "projects/hooks/tests/test_memory.py",
}

# below each file: name | the tests | text | its replacement
TABLE = """
trainkit/engine/metrics.py
the host runs ahead without a limit | ahead | wait_for(self._recent.popleft()) | self._recent.popleft()
trainkit/utils/events/numbers.py
numbers are read before they have arrived | waits | wait_for(arrived) | pass
numbers are copied into pageable memory | waits | , device="cpu", pin_memory=True) | , device="cpu")
pinned memory on the default device | trainers | , device="cpu", pin_memory=True) | , pin_memory=True)
trainkit/utils/events/worker.py
the worker has the first GPU | trainers | use_device(device_index) | pass
trainkit/utils/device.py
an event on another device | waits | event.record(stream) | event.record()
a wait makes a context on the current GPU | waits | with torch.accelerator.device_index(event.device.index): | if True:
a thread that waits spins | waits | torch.cuda.Event(blocking=True) | torch.cuda.Event()
the copies of a batch block | waits | non_blocking=runs_ahead(device) | non_blocking=False
trainkit/data/build.py
the loader does not pin its memory | waits | pin_memory=pin_memory and accelerator_runs_ahead() | pin_memory=False
trainkit/engine/feed.py
batches are not copied ahead | races | self.move(batch, device) | move_to_device(batch, device)
trainkit/engine/amp.py
autocast is left out | trainers | with torch.autocast(self._device_type, dtype=self.precision): | if True:
autocast is always float16 | trainers | dtype=self.precision) | dtype=torch.float16)
the update is not that of the scaler | trainers | self.grad_scaler.step(self.optimizer) | self.optimizer.step()
the scale is not copied before it changes | trainers | _get_scale_async()).clone() | _get_scale_async())
momentum is not prepared for a skipped update | trainers | start_momentum(optimizer) | pass
projects/hooks/data.py
the computation does not wait for the copy | races | current.wait_stream(self._stream) | pass
the memory of a batch is free during the computation | races | leaf.record_stream(current) | pass
each batch has a stream of its own | copies | if self._stream is None or self._stream.device != device: | if True:
batches are copied on the stream of the computation | copies | with self._stream: | if True:
projects/async_save/format.py
the thread of saves has the first GPU | trainers | use_device(device_index) | pass
projects/async_save/host_copy.py
a save leaves no reserve on the device | trainers | reserve = total // 10 | reserve = 0
a copy is written before it has arrived | trainers | wait_for(arrival) | pass
the copy to the host does not wait for that on the device | races | stream.wait_stream( | str(
memory is free before it is copied | trainers | (new_event(device), to_host) | (new_event(device), ())
the copy of a state blocks | waits | non_blocking=is_pinned | non_blocking=False
trainkit/checkpoint/checkpointer.py
a save takes the memory of one under way | trainers | with contextlib.suppress(CheckpointError):  # of an | if False:  #
projects/non_finite/policies.py
the flag is not given to the optimizer | trainers | optimizer.found_inf = flag | optimizer.found_inf = 0 * flag
a skipped step changes the buffers | trainers | if former is not None: | if False:
the flag is read by the host | not finite | elif not skips_on_device(optimizer): | elif True:
projects/logical_ranks/trainer.py
means are sorted by a list of places | waits | torch.stack(in_order) | torch.stack(in_order)[[*range(len(in_order))]]
projects/graph/recorder.py
no thread may call CUDA during a recording | graph | "thread_local" | "global"
the memory pool of recordings is not kept | graph | self._newest = graph | pass
ordinary steps do not wait for the batch | races | self._stream.wait_stream(current) | pass
nobody watches for waits before a recording | graph | torch.cuda.set_sync_debug_mode("warn") | pass
projects/graph/trainer.py
a recording after one ordinary step | graph | WARM_UP_ITERS = 3 | WARM_UP_ITERS = 1
changed settings are not noticed | graph | *map(itemgetter.__call__, trainer._settings, groups) | *()
the state of an optimizer stays on the host | graph | state[name] = value.to(parameter.device) | state[name] = value
losses are not copied before the next replay | graph | self._packed.clone().unbind() | self._packed.unbind()
"""


def parsed(table: str) -> dict[str, list[tuple[str, str, str, str]]]:
    """file -> (name, text, its replacement, test file) of each mutant."""
    found: dict[str, list[tuple[str, str, str, str]]] = {}
    for line in table.strip().splitlines():
        if " | " not in line:
            of_file = found[line] = []
        else:
            name, tests, old, new = line.split(" | ")
            of_file.append((name, old, new, FILES[tests]))
    return found


MUTANTS = parsed(TABLE)


def main() -> int:
    word, killed = " ".join(sys.argv[1:]), []
    chosen = [
        (file, *mutant)
        for file, mutants in MUTANTS.items()
        for mutant in mutants
        if word in mutant[0]
    ]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder, "copy"), ignore=LEFT_OUT))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{copy}:{copy / 'projects'}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        environment["FAKE_CUDA"] = str(build(Path(folder)))
        options = [
            "-x",
            "-q",
            "-m",
            "cuda",
            "-p",
            "tests.fake_cuda.device",
            "-p",
            "no:xdist",
            f"--basetemp={folder}/tmp",
        ]

        def fails(tests: Collection[str]) -> bool:
            command = ["timeout", "900", sys.executable, "-m", "pytest", *options, *tests]
            return (
                subprocess.run(command, cwd=copy, env=environment, capture_output=True).returncode
                != 0
            )

        if fails({mutant[-1] for mutant in chosen}):
            sys.exit("the tests fail without a mutant")
        for file, name, old, new, tests in chosen:
            source = (copy / file).read_text()
            if source.count(old) != 1:
                sys.exit(f"{file} has {source.count(old)} times the text {old!r}; accepted: once")
            (copy / file).write_text(source.replace(old, new))
            killed.append(fails([tests]))
            (copy / file).write_text(source)
            print("killed  " if killed[-1] else "SURVIVED", name, flush=True)
    print(f"{sum(killed)} of {len(chosen)} mutants are killed")
    return 0 if all(killed) else 1


if __name__ == "__main__":
    sys.exit(main())
