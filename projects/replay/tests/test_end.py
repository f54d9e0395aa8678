"""A replay that a signal ends leaves no temporary folder and no process."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from trainkit.projects.replay.tests.job import Job

from tests.docs.pages import ROOT
from tests.forked import script, start_forked

# It writes into a pipe when it has come to its place, and hangs there.
SCRIPT = """
import os, sys
from trainkit.engine import CallbackHook
from trainkit.projects.replay.tests.job import train

place, pipe = sys.argv[1:]
is_new_process = "replay-" in os.environ.get("TMPDIR", "")


def wait(here):
    if here == place:
        os.write(os.open(pipe, os.O_WRONLY), b"!")
        os.read(os.open("nothing", os.O_RDWR), 1)


wait("before the training")
hook = CallbackHook(
    before_step=lambda trainer: wait("in the new process" if is_new_process else "on the way")
)
train("run", options=("SOLVER.CHECKPOINT_PERIOD", 100, "DATASETS.TEST", ()), hooks=[hook])
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["before the training", "on the way", "in the new process"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_replay_that_a_signal_ends_leaves_no_temporary_folder_and_no_process(
    place, signum, tmp_path
):
    Job(tmp_path / "run", "SOLVER.CHECKPOINT_PERIOD", 100, "DATASETS.TEST", ())()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "nothing")
    words = ["run", "--iter", "3", "--", "train.py", place, "pipe"]

    def run_replay():
        signal.signal(signum, signal.SIG_DFL)  # the tests may run under nohup, which ignores SIGHUP
        tempfile.tempdir = str(temporary)
        script(ROOT / "tools/replay.py", *words)()

    out, err = str(tmp_path / "out"), str(tmp_path / "err")
    process = start_forked(run_replay, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)}, out, err)
    with open(tmp_path / "pipe", "rb", buffering=0) as pipe:
        assert pipe.read(1) == b"!"
        assert [path.name[:7] for path in temporary.iterdir()][:1] == ["replay-"]
        os.kill(process.pid, signum)
        process.join()
        assert pipe.read() == b""  # the process at its other end has ended too

    assert process.exitcode == 128 + signum, Path(err).read_text(encoding="utf-8")
    assert [*temporary.iterdir()] == []
