"""The sweep: which runs it makes, what it repeats, and what its table says."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tools import sweep
from trainkit.config import ConfigError
from trainkit.utils.run_folder import own_folder, release_folder

ROOT = Path(__file__).resolve().parents[2]

# stands for train_net.py: notes its calls, and writes what a run writes
STUB = """
import json, os, signal, sys
from pathlib import Path

words = sys.argv[1:]
given = dict(zip(words[words.index("OUTPUT_DIR") :: 2], words[words.index("OUTPUT_DIR") + 1 :: 2]))
folder = Path(given["OUTPUT_DIR"])
folder.mkdir(exist_ok=True)
lr = float(given["SOLVER.BASE_LR"])
with open(folder.parent / "calls", "a") as calls:
    print(lr, os.environ.get("CUDA_VISIBLE_DEVICES", "-"), *words[: words.index("OUTPUT_DIR")], file=calls)
if "--stop" in words and not (folder.parent / "stopped").exists():
    (folder.parent / "stopped").touch()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.kill(os.getppid(), signal.SIGTERM)
    sys.exit(143 if signal.sigtimedwait([signal.SIGTERM], 60) else "the sweep goes on")
if lr > 1:
    sys.exit("too large")
rows = [{"iteration": i, "total_loss": 1 / (i + 1), "val/top1": lr * 100 - abs(i - 3)} for i in range(6)]
rows.append({"iteration": 6, "val/top1": 1.0, "test/val/top1": 99.0})
(folder / "metrics.json").write_text("\\n".join(map(json.dumps, rows)))
(folder / "config.yaml").write_text("CHECKPOINT:\\n  BEST_METRIC: val/top1\\n")
"""


@pytest.fixture
def stub(tmp_path):
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    return path


def run(*words):
    return sweep.main(sweep.parse_args([*map(str, words)]))


def calls(folder):
    return sorted((folder / "calls").read_text().splitlines())


def test_a_grid_has_every_combination_and_names_say_the_settings():
    runs = sweep.make_grid({"A.LR": "0.1, 0.2", "STEPS": "(1,2);(3,)"})
    assert [tuple(settings.values()) for settings in runs] == [
        ("0.1", "(1,2)"), ("0.1", "(3,)"), ("0.2", "(1,2)"), ("0.2", "(3,)")
    ]  # fmt: skip
    assert sweep.name_run({"A.LR": "0.1", "B": "-2"}) == "A.LR=0.1,B=-2"
    names = [
        *map(sweep.name_run, runs),
        *(sweep.name_run({"KEY": "x" * 200 + end}) for end in "ab"),
    ]
    assert len({*names}) == 6
    assert names[0].startswith("A.LR=0.1,STEPS=_1,2_-")
    assert max(map(len, names)) < 100


def test_draws_are_in_their_ranges_and_a_larger_number_begins_with_those_of_a_smaller_one():
    specs = {"LOG": "log:1e-4..1", "FLAT": "0.5..1", "WHOLE": "2..4", "ONE_OF": "a,b"}
    runs = sweep.draw(specs, 300, seed=1)
    assert sweep.draw(specs, 5, seed=1) == runs[:5] != sweep.draw(specs, 5, seed=2)
    # half of the decades
    assert 120 < sum(float(settings["LOG"]) < 1e-2 for settings in runs) < 180
    assert all(1e-4 <= float(settings["LOG"]) <= 1 for settings in runs)
    assert all(0.5 <= float(settings["FLAT"]) <= 1 for settings in runs)
    for key, values in (("WHOLE", {"2", "3", "4"}), ("ONE_OF", {"a", "b"})):
        assert {settings[key] for settings in runs} == values


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["SOLVER.BASE_LR"], "'SOLVER.BASE_LR' is no KEY=VALUES"),
        (["SEED=1..3"], "SEED=1..3 is a range, which has no grid"),
        (["SEED=1,2", "--random", "3"], "--random is 3, but only 2 settings are different"),
        (["SOLVER.BASE_L=0.1,0.2"], "unknown key SOLVER.BASE_L; did you mean 'SOLVER.BASE_LR'"),
        (
            ["SEED=1", "--metric", "speed"],
            "'speed' does not tell whether more or less is better; give --mode",
        ),
    ],
)
def test_a_mistake_is_an_error_before_anything_is_trained(tmp_path, words, error):
    with pytest.raises(ConfigError, match=error):
        run(tmp_path / "sweep", *words)
    assert [*tmp_path.iterdir()] == []


def test_a_dry_run_prints_commands_that_train_net_understands(tmp_path, capsys):
    assert (
        run(tmp_path, "SEED=1,2", "--dry-run", "--", "--num-gpus", "2", "SOLVER.MAX_ITER", 4) == 0
    )
    command = (
        f"train_net.py --resume --num-gpus 2 SOLVER.MAX_ITER 4 OUTPUT_DIR {tmp_path}/SEED=1 SEED 1"
    )
    assert capsys.readouterr().out.splitlines()[0].endswith(command)


@pytest.mark.slow
def test_the_table_has_the_best_run_first_and_what_has_failed_is_tried_again(
    tmp_path, stub, capsys
):
    words = (
        tmp_path,
        "SOLVER.BASE_LR=0.1,2,0.5",
        "--script",
        stub,
        "--processes",
        2,
        "--devices",
        "3",
    )
    assert run(*words, "--", "SEED", 1) == 1
    with (tmp_path / "sweep.csv").open(newline="") as file:
        table = [*csv.reader(file)]
    printed = capsys.readouterr().out

    assert table == [
        ["SOLVER.BASE_LR", "best val/top1", "after iterations", "at the end", "state"],
        ["0.5", "50.0", "4", "99.0", "finished"],
        ["0.1", "10.0", "4", "99.0", "finished"],
        ["2", "", "", "", "failed (1)"],
    ]
    assert f"1 runs have failed; see {tmp_path / 'SOLVER.BASE_LR=2'}.txt" in printed
    assert (tmp_path / "SOLVER.BASE_LR=2.txt").read_text() == "too large\n"
    assert calls(tmp_path) == [f"{lr} 3 --resume SEED 1" for lr in (0.1, 0.5, 2.0)]

    more = (tmp_path, "SOLVER.BASE_LR=0.1,2,0.5,0.2", "--script", stub)
    assert run(*more, "--metric", "lost", "--mode", "max", "--", "SEED", 1) == 1
    assert [line[:3] for line in calls(tmp_path)] == ["0.1", "0.2", "0.5", "2.0", "2.0"]
    printed = capsys.readouterr().out
    assert "4 runs, 2 of them finished" in printed
    assert "No run has the metric of the column 'best lost'" in printed
    with pytest.raises(
        ConfigError, match=r"has the sweep of another command: .*stub.py SEED 1; this one is"
    ):
        run(*more, "--", "SEED", 2)


@pytest.mark.slow
def test_a_signal_ends_the_runs_and_the_same_command_goes_on(tmp_path, stub, capsys):
    words = (tmp_path, "SOLVER.BASE_LR=0.1,0.2", "--script", stub, "--", "--stop")
    assert run(*words) == 143  # the first run sends it
    printed = capsys.readouterr().out
    assert "ended with exit code 143" in printed
    assert printed.count("not finished") == 2
    assert run(*words) == 0
    assert [line[:3] for line in calls(tmp_path)] == ["0.1", "0.1", "0.2"]


@pytest.mark.slow
def test_a_run_that_still_trains_after_the_kill_of_a_sweep_is_waited_for(tmp_path, stub):
    own_folder(tmp_path / "SOLVER.BASE_LR=0.1")
    words = [str(tmp_path), "SOLVER.BASE_LR=0.1,0.2", "--script", str(stub)]
    command = [sys.executable, str(ROOT / "tools/sweep.py"), *words]
    sweep = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert sweep.stdout.readline() == "2 runs, 0 of them finished\n"
    assert sweep.stdout.readline().startswith("SOLVER.BASE_LR=0.2: finished")
    assert [line[:3] for line in calls(tmp_path)] == ["0.2"]
    with pytest.raises(ConfigError, match="cannot be used: .* belongs to another run"):
        run(*words)
    release_folder(tmp_path / "SOLVER.BASE_LR=0.1")
    assert "SOLVER.BASE_LR=0.1: finished" in sweep.communicate()[0]
    assert sweep.returncode == 0
