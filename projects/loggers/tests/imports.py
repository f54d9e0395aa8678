"""What a writer imports while it writes, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

WRITE_IN_A_THREAD = """
import sys, threading
import torch
from trainkit.utils.events import EventStorage, {name}

writer = {writer}
first = set(sys.modules)
if {started}:
    writer.begin(None)


def write():
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        storage.put_image("image", torch.zeros(3, 2, 2))
        storage.put_histogram("weights", torch.arange(4.0))
        writer.write()
        writer.state_dict()
        writer.close()


before = set(sys.modules)
thread = threading.Thread(target=write)
thread.start()
thread.join()
print(*sorted(before - first))
print(*sorted(set(sys.modules) - before))
"""


def imported_by_writing(writer, folder, *, started):
    """The names of modules that the writer's ``begin`` has imported, and those that its writing has.

    Args:
        writer: what makes it, an expression.
        folder: the working directory.
        started: whether the writer's ``begin`` was called before.
    """
    code = WRITE_IN_A_THREAD.format(writer=writer, name=writer.partition("(")[0], started=started)
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    by_begin, by_writing = done.stdout.splitlines()
    return by_begin.split(), by_writing.split()
