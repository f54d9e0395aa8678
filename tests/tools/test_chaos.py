"""The tool kills a command at random times, resumes it, and says whether it ends as one that was not killed."""

import json
import os
import re
import sys
import time

import pytest

from tests.docs.pages import fences, page
from tests.tools.command import call
from tools import chaos

# Writes ten lines of metrics. A line depends on the number of lines before; with "forgets", on the start too.
JOB = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--folder") + 1])
folder.mkdir(exist_ok=True)
file = folder / "metrics.json"
lines = file.read_text().splitlines() if "--resume" in sys.argv and file.exists() else []
start = len(lines) if "forgets" in sys.argv else 0
for number in range(len(lines), 10):
    time.sleep(0.05)
    lines.append(json.dumps({"iteration": number, "loss": number - start, "time": time.time()}))
    temporary = folder / "temporary"
    temporary.write_text("".join(f"{line}\\n" for line in lines))
    temporary.rename(file)
    if "without checkpoints" not in sys.argv:
        (folder / "last_checkpoint").write_text(f"line {number}")
sys.exit("fails" in sys.argv)
"""


@pytest.fixture
def kill(tmp_path, monkeypatch, capsys):
    """Run the tool on the job."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def kill(*words, kills=4):
        command = [sys.executable, script, "--folder", "{folder}", *words]
        return call(chaos, capsys, "--kills", kills, "--", *command)

    return kill


def kind_of(line):
    """A printed line without its numbers, spaces and the name of a checkpoint."""
    return re.sub(r"goes on from .*|[\d. ]", "", line)


def test_a_job_that_goes_on_is_identical_and_leaves_nothing(kill, tmp_path):
    code, out, _ = kill()
    lines = out.splitlines()
    killed = [line for line in lines if " killed after " in line]
    assert code == 0
    assert [line.split()[0] for line in killed] == ["1", "2", "3", "4"]
    assert {line.rpartition("; ")[2].split(" line")[0] for line in killed} <= {
        "goes on from",
        "starts anew",
    }
    assert "goes on from line " in out
    ended = [line for line in lines if line.endswith(" has ended")]
    assert (
        lines.count(
            "identical: 0 checkpoints and 1 metrics.json, bit by bit, except clock readings"
        )
        == len(ended)
        >= 1
    )
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]
    [shown] = [text for language, text in fences(page("docs/exact_resume.md")) if not language]
    assert {kind_of(line) for line in shown.splitlines()} <= {kind_of(line) for line in lines}


def test_a_job_that_forgets_differs_and_its_folders_stay(kill, tmp_path):
    code, out, _ = kill("forgets")
    assert code == 1
    assert "metrics.json: iteration " in out
    assert f"the runs are in {tmp_path}/chaos_" in out
    [folder] = tmp_path.glob("chaos_*")
    rows = [json.loads(line) for line in (folder / "whole/metrics.json").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [*range(10)]


def test_a_job_that_fails_is_one_line(kill):
    code, _, err = kill("fails")
    assert code == 1
    assert err.startswith("error: the command ends with the exit code 1, see ")
    assert err.count("\n") == 1


def test_all_processes_of_the_command_are_killed(tmp_path):
    folder = tmp_path / "run"
    child = "import os, pathlib, time; pathlib.Path('child').write_text(str(os.getpid())); time.sleep(60)"
    start = f"import os, subprocess, sys; os.chdir({str(tmp_path)!r})"
    parent = f"{start}; subprocess.run([sys.executable, '-c', {child!r}])"
    command = chaos.Command([sys.executable, "-c", parent])
    assert not command.run(folder, limit_sec=4)
    process = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while is_running(process):
        assert time.monotonic() < deadline


def is_running(process):
    """Whether it runs; one that is dead may wait for a parent that asks."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_settings_are_added_to_a_command_without_a_place_for_the_folder(tmp_path):
    script = "import sys; print(sys.argv[1:])"
    chaos.Command([sys.executable, "-c", script, "A", "1"]).run(tmp_path / "run", "--resume")
    said = (tmp_path / "run.txt").read_text()
    assert said == f"{['A', '1', '--resume', 'OUTPUT_DIR', os.fspath(tmp_path / 'run')]}\n"


@pytest.mark.slow
def test_the_default_job_is_identical(capsys):
    command = ["tools/train_net.py", "SOLVER.MAX_ITER", "200", "SOLVER.CHECKPOINT_PERIOD", "20"]
    code, out, _ = call(chaos, capsys, "--kills", "2", "--", sys.executable, *command)
    assert code == 0, out
    assert re.search(r"identical: \d+ checkpoints and 1 metrics.json", out)


def test_kills_that_show_nothing_are_an_error(kill, monkeypatch):
    """Without a checkpoint to go on from, a job that forgets is like a job that resumes."""
    monkeypatch.setattr(chaos, "MOST_MORE_KILLS", 2)
    code, _, err = kill("forgets", "without checkpoints", kills=1)
    assert code == 1
    assert "this shows nothing" in err
