"""The job of docs/getting_started.md, step by step as it stands there."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from tests.docs.pages import ROOT, blocks, contents, page, run
from trainkit.data import DatasetCatalog
from trainkit.engine import default_argument_parser

PAGE = "docs/getting_started.md"
SCRIPT, USE, METRIC, RETURN_METRIC, HOOK, REGISTER, NOTEBOOK, ANOTHER_RATE = blocks(PAGE, "python")
COMMANDS = [shlex.split(line) for block in blocks(PAGE, "sh") for line in block.splitlines()]
_, TRAIN, CHANGED, PLOT, TRIAL, EVALUATE, RESUME, TWO = COMMANDS
WITH_METRIC = METRIC + SCRIPT.replace(
    "(DefaultTrainer):\n", f"(DefaultTrainer):\n{textwrap.indent(RETURN_METRIC, '    ')}\n"
)
TABLE_LINE = "| classification | top1                | 100.0000 |"
END = "The run has finished after 600 of 600 iterations\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """That of the clone, for all steps."""
    return tmp_path_factory.mktemp("clone")


@pytest.fixture
def train(folder, monkeypatch, capsys):
    """Run a command of train.py here; gives what it prints."""
    monkeypatch.chdir(folder)

    def train(command, script=SCRIPT):
        assert command[:2] == ["python", "train.py"]
        main = run(script, "train.py")["main"]
        main(default_argument_parser().parse_args(command[2:]))
        DatasetCatalog.remove("spirals_test")  # the next one registers it again
        return capsys.readouterr().out

    return train


@pytest.mark.slow
def test_the_job_learns_the_spirals_and_two_runs_are_compared_in_a_picture(
    train, folder, monkeypatch, capsys
):
    printed = train(TRAIN)
    for line in (TABLE_LINE, END):
        assert line in printed
        assert line in page(PAGE)
    assert f"\n  files in {folder}/output/spirals:" in printed
    run_folder = folder / "output/spirals"
    before = contents(run_folder)
    assert TABLE_LINE in train(EVALUATE)
    assert "The trial run has ended without an error" in train(TRIAL)
    assert "nothing is done" in train(RESUME)
    assert contents(run_folder) == before
    assert {"log.txt", "metrics.json", "config.yaml", "model_final.pth"} <= before.keys() | {
        "log.txt"
    }
    assert (run_folder / "log.txt").exists()

    monkeypatch.setitem(sys.modules, "train", SimpleNamespace(**run(SCRIPT, "train.py")))
    points = run(USE, PAGE)["points"]
    DatasetCatalog.remove("spirals_test")
    assert len(points) == 5
    assert capsys.readouterr().out.endswith("\ntensor([0, 1, 0, 1, 0])\n")  # labels alternate

    pytest.importorskip("matplotlib")
    train(CHANGED)
    assert PLOT[:3] == ["python", "-m", "trainkit.projects.plots"]
    plots = importlib.import_module("trainkit.projects.plots.__main__")
    plots.main(plots.parse_args(PLOT[3:]))
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_hook_logs_and_a_width_that_makes_no_sense_is_one_message(train, capsys):
    script = SCRIPT.replace("class Trainer(", f"{HOOK}\n\nclass Trainer(")
    script = script.replace(
        "(DefaultTrainer):\n", f"(DefaultTrainer):\n{textwrap.indent(REGISTER, '    ')}\n"
    )
    script = script.replace(
        "from trainkit.engine import ", "from trainkit.engine import HookBase, ", 1
    )
    short = ["OUTPUT_DIR", "output/hook", "SOLVER.MAX_ITER", "20", "SOLVER.WARMUP_ITERS", "2"]
    assert " gradient_norm: " in train([*TRAIN, *short], script)
    with pytest.raises(SystemExit):
        train([*TRAIN, "OUTPUT_DIR", "output/wrong", "MODEL.WIDTH", "0"])
    DatasetCatalog.remove("spirals_test")
    assert capsys.readouterr().err == "error: MODEL.WIDTH is 0; accepted: a number of at least 1\n"


def test_an_evaluator_of_ones_own_chooses_the_best_weights_and_ends_the_run(train, folder):
    [text] = re.findall(r"^`(CHECKPOINT.BEST_METRIC .+?)`", page(PAGE), re.MULTILINE)
    [more] = re.findall(r"^`(EARLY_STOPPING.METRIC .+?)`", page(PAGE), re.MULTILINE)
    options = ["OUTPUT_DIR", "output/error", "TEST.EVAL_PERIOD", "1ep", "SOLVER.BASE_LR", "1e-30"]
    printed = train([*TRAIN, *options, *text.split(), *more.split()], WITH_METRIC)
    assert "finished after 80 of 600 iterations, early" in printed  # nothing is learned
    assert (folder / "output/error/model_best.pth").exists()


@pytest.mark.slow
def test_two_processes_do_the_same(folder):
    (folder / "train.py").write_text(WITH_METRIC)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, *TWO[1:]]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| classification | error    |  0.0000 |" in done.stdout


def test_the_cells_of_a_notebook_train_and_show_it(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    cells = SCRIPT.partition("def main(args)")[0] + NOTEBOOK.replace("30ep", "1ep")
    names = run(cells, "notebook")
    assert names["results"]["classification"]["top1"] > 40
    run(ANOTHER_RATE, "notebook", **names)
    trainer = names["trainer"]
    rates = {iter: lr for lr, iter in trainer.storage.history("lr").values()}
    # the base rate 0.005 in place of 0.01: half of what the schedule gives
    for iteration in (20, 40, 79):
        expected = 0.5 * trainer.scheduler.schedule(iteration, 0.01)
        assert rates[iteration] == pytest.approx(expected)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.75
    trainer.train(max_iter=trainer.iter + 2)
    assert [lr for lr, _ in trainer.storage.history("lr").values()][-2:] == [0.75, rates[79]]
    DatasetCatalog.remove("spirals_test")
    assert "The run has finished after 20 of 20 iterations\n" in capsys.readouterr().out
