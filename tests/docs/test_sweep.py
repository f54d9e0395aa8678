"""The script of docs/sweep.md: which runs it starts, what it does after a kill, and what its table says."""

import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.docs.pages import ROOT, blocks
from tests.engine.tiny import Weight, sgd
from trainkit.config import get_cfg
from trainkit.engine import SimpleTrainer, hooks
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.utils.run_folder import release_folder

optuna = pytest.importorskip("optuna", reason="needs optuna (pip install -e '.[sweep]')")

RANDOM, SCRIPT = blocks("docs/sweep.md", "python")
(PRUNING,) = blocks("docs/sweep.md", "yaml")

# stands for a training script: notes its settings and writes what a run writes; its last result is not its best
STUB = """
import json, os, sys, time
from pathlib import Path

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = Path(given["OUTPUT_DIR"])
folder.mkdir(parents=True, exist_ok=True)
with open("calls", "a") as calls:
    of_process = {"device": os.environ.get("CUDA_VISIBLE_DEVICES"), "trial": os.environ.get("SWEEP_TRIAL")}
    print(json.dumps({**given, **of_process}), file=calls)
if given["LR"] == "0.5" and not Path("mended").exists():
    sys.exit("it fails")
if Path("pair").exists():
    Path("at_" + given["LR"]).touch()
    end = time.monotonic() + 60
    while len([*Path().glob("at_*")]) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    if time.monotonic() >= end:
        sys.exit("it is alone")
best = float(given["LR"]) * 100 + [1, 4, 10][int(given.get("FOLD", 0))]
values = [best - 3, best, None, best - 1]
rows = [{"iteration": i, "classification/top1": value} for i, value in enumerate(values)]
rows.append({"iteration": 4, "total_loss": 1000})
(folder / "metrics.json").write_text("\\n".join(map(json.dumps, rows)))
if given["LR"] != "0.6":
    (folder / "finished").touch()
"""

# the small job of the other tests; a run or the whole sweep is killed where the test says it
TRAIN = """
import os
import signal
from pathlib import Path

import torch

from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer, HookBase, default_argument_parser, default_setup


class Killed(HookBase):
    def before_train(self):
        with open("starts", "a") as starts:
            print(self.trainer.start_iter, file=starts)

    def after_backward(self):
        if self.trainer.iter == 7 and Path("kill").exists():
            process = os.getpid() if Path("kill").read_text() == "the run" else 0  # its group
            Path("kill").unlink()
            os.kill(process, signal.SIGKILL)
            signal.pause()


torch.set_num_threads(1)
args = default_argument_parser().parse_args()
cfg = tiny_cfg("", "TEST.EVAL_PERIOD", 2)
cfg.merge_from_file("job.yaml")
cfg.merge_from_list(args.opts)
default_setup(cfg, args)
trainer = DefaultTrainer(cfg)
trainer.register_hooks([Killed()])
trainer.resume_or_load(resume=args.resume)
trainer.train()
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """The script as a module, in a folder of its own, with a job that takes no time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HOOK_REGISTRY, "_objects", dict(HOOK_REGISTRY._objects))
    (tmp_path / "sweep.py").write_text(SCRIPT)
    (tmp_path / "train.py").write_text(STUB)
    spec = importlib.util.spec_from_file_location("sweep", tmp_path / "sweep.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.COMMAND = [sys.executable, "train.py"]
    module.SPACE = {"LR": module.CategoricalDistribution([0.1, 0.3])}
    module.REPEATS = [{}]
    yield module
    release_folder(module.FOLDER)


@pytest.fixture
def calls(tmp_path):
    """The runs that were started since the last call of this function: their settings, in order of the text."""

    def calls():
        file = tmp_path / "calls"
        text = file.read_text() if file.exists() else ""
        file.unlink(missing_ok=True)
        return [json.loads(line) for line in sorted(text.splitlines())]

    return calls


def start(sweep, **settings):
    for name, value in settings.items():
        setattr(sweep, name, value)
    sweep.main()


def table(printed):
    """The rows of the table, in words."""
    return [line.split() for line in printed.splitlines()[2:]]


def test_a_grid_runs_each_combination_once_and_added_values_add_runs(sweep, calls, capsys):
    choices = sweep.CategoricalDistribution
    space = {"LR": choices([0.1, 0.3]), "NAME": choices(["a", "b/c"])}
    start(sweep, SPACE=space)
    settings = [(call["LR"], call["NAME"]) for call in calls()]
    assert sorted(settings) == [("0.1", "a"), ("0.1", "b/c"), ("0.3", "a"), ("0.3", "b/c")]
    assert sorted(path.name for path in sweep.FOLDER.iterdir() if path.is_dir()) == [
        "TRIAL=0,LR=0.1,NAME=a",
        "TRIAL=1,LR=0.1,NAME=b_c",
        "TRIAL=2,LR=0.3,NAME=a",
        "TRIAL=3,LR=0.3,NAME=b_c",
    ]

    start(sweep)
    assert calls() == []

    capsys.readouterr()
    start(sweep, SPACE={"LR": choices([0.1, 0.2, 0.3]), "NAME": choices(["a", "b/c"])})
    settings = [(call["LR"], call["NAME"]) for call in calls()]
    assert sorted(settings) == [("0.2", "a"), ("0.2", "b/c")]
    rows = table(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["0.3", "0.3", "0.2", "0.2", "0.1", "0.1"]
    assert rows[0] == ["0.3", "a", "31", "complete", "TRIAL=2,LR=0.3,NAME=a"]


def test_a_random_search_is_the_same_for_a_seed_and_a_larger_one_adds_runs(sweep, calls):
    space = {
        "LR": sweep.FloatDistribution(1e-4, 1, log=True),
        "WIDTH": sweep.IntDistribution(8, 32),
    }
    start(sweep, SPACE=space, NUM_DRAWS=3, DRAW_SEED=5)
    first = {(call["LR"], call["WIDTH"]) for call in calls()}
    start(sweep, NUM_DRAWS=5)
    added = {(call["LR"], call["WIDTH"]) for call in calls()}
    start(sweep, FOLDER=sweep.FOLDER / "again")
    again = {(call["LR"], call["WIDTH"]) for call in calls()}
    start(sweep, FOLDER=sweep.FOLDER / "others", DRAW_SEED=6)
    others = {(call["LR"], call["WIDTH"]) for call in calls()}

    assert (len(first), len(added)) == (3, 2)
    assert again == first | added
    assert len(others) == 5
    assert others.isdisjoint(again)
    assert all(1e-4 <= float(lr) <= 1 and 8 <= int(width) <= 32 for lr, width in again | others)
    of_two = {"LR": sweep.CategoricalDistribution([0.1, 0.3])}
    start(sweep, FOLDER=sweep.FOLDER / "twice", SPACE=of_two, NUM_DRAWS=6)
    assert [call["LR"] for call in calls()] == ["0.1", "0.3"]  # each once

    sweep.NUM_DRAWS, sweep.SPACE = 200, space
    draws = [settings["LR"] for settings in sweep.choose_settings()]
    assert 80 < sum(lr < 1e-2 for lr in draws) < 120  # half of the decades


def test_the_space_of_the_page_is_drawn_from_its_ranges(sweep):
    exec(RANDOM, sweep.__dict__)
    draws = sweep.choose_settings()
    assert len(draws) == 12
    rates, widths, decays = zip(*(settings.values() for settings in draws), strict=True)
    assert 1e-3 <= min(rates) < 0.03 < max(rates) <= 1  # 0.03 is in the middle of the decades
    assert 8 <= min(widths) < 20 < max(widths) <= 32
    assert {*decays} == {0.0, 1e-4}
    cfg = get_cfg()
    for settings in draws:
        cfg.merge_from_list([word for setting in settings.items() for word in setting])


@pytest.mark.parametrize(("mode", "best"), [("max", ["0.3", "0.1"]), ("min", ["0.1", "0.3"])])
def test_the_result_of_a_trial_is_the_mean_of_its_folds(sweep, calls, capsys, mode, best):
    start(sweep, REPEATS=[{"FOLD": fold} for fold in range(3)], MODE=mode)
    trials = {(call["LR"], call["FOLD"]): call["trial"] for call in calls()}
    assert trials == {
        **{
            ("0.1", "0"): "0",
            ("0.1", "1"): None,
            ("0.1", "2"): None,
        },  # the first fold is looked at
        **{("0.3", "0"): "1", ("0.3", "1"): None, ("0.3", "2"): None},
    }
    rows = {row[0]: row for row in table(capsys.readouterr().out)}
    assert [*rows] == best
    # the best values are 11, 14, 20 and 31, 34, 40; the worst ones, of the first evaluation, are 3 less
    less = 0 if mode == "max" else 3
    assert rows["0.1"][1:3] == [str(15 - less), "4.58258"]  # the root of (4**2 + 1 + 5**2) / 2
    assert rows["0.3"][1:3] == [str(35 - less), "4.58258"]
    (folder, *_) = (path for path in sweep.FOLDER.iterdir() if path.name.startswith("TRIAL=0"))
    assert sorted(path.name for path in folder.iterdir()) == ["FOLD=0", "FOLD=1", "FOLD=2"]


def test_a_trial_that_has_failed_continues_in_its_folder_at_the_next_start(
    sweep, calls, capsys, tmp_path
):
    start(sweep, SPACE={"LR": sweep.CategoricalDistribution([0.1, 0.5, 0.6])})
    assert [row[-2:] for row in table(capsys.readouterr().out)] == [
        ["complete", "TRIAL=0,LR=0.1"],
        ["fail", "TRIAL=1,LR=0.5"],
        ["fail", "TRIAL=2,LR=0.6"],  # its exit code is 0, but the run is not finished
    ]
    assert (sweep.FOLDER / "TRIAL=1,LR=0.5.txt").read_text() == "it fails\n"
    first = {call["LR"]: call["OUTPUT_DIR"] for call in calls()}
    (tmp_path / "mended").touch()
    start(sweep)
    second = {call["LR"]: call["OUTPUT_DIR"] for call in calls()}
    assert second == {lr: first[lr] for lr in ("0.5", "0.6")}
    assert table(capsys.readouterr().out)[0][-2:] == ["complete", "TRIAL=1,LR=0.5"]


@pytest.mark.parametrize("state", ["FAIL", "RUNNING"])
def test_what_a_killed_trial_has_reported_stays_known(sweep, calls, state):
    sweep.SPACE = {"LR": sweep.CategoricalDistribution([0.1])}
    killed = optuna.trial.create_trial(
        state=optuna.trial.TrialState[state],
        params={"LR": 0.1},
        distributions=sweep.SPACE,
        user_attrs={"folder": "killed"},
        intermediate_values={2: 50.0, 4: 60.0},
    )
    sweep.open_study().add_trial(killed)
    start(sweep)
    assert [call["OUTPUT_DIR"] for call in calls()] == ["output/sweep/killed"]
    former, copy = sweep.open_study().trials
    assert (former.state.name, copy.state.name) == ("FAIL", "COMPLETE")
    assert copy.intermediate_values == {2: 50.0, 4: 60.0}


def test_a_sweep_that_is_running_is_not_started_again(sweep, calls):
    sweep.FOLDER.mkdir(parents=True)
    with (sweep.FOLDER / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="belongs to another run"):
            start(sweep)
    assert calls() == []


def test_runs_at_the_same_time_see_a_device_each(sweep, calls, tmp_path, capsys):
    (tmp_path / "pair").touch()
    start(sweep, SPACE={"LR": sweep.CategoricalDistribution([0.1, 0.2, 0.3])}, DEVICES=["4", "6"])
    assert {call["device"] for call in calls()} == {"4", "6"}
    assert [row[-2] for row in table(capsys.readouterr().out)] == ["complete"] * 3


def test_a_folder_has_one_job_and_a_metric_that_no_run_has_is_an_error(sweep, calls):
    start(sweep)
    calls()
    with pytest.raises(SystemExit, match=r"has the sweep of another job: .*Choose another FOLDER"):
        start(sweep, REPEATS=[{"FOLD": 0}])
    with pytest.raises(ValueError, match="there is no val/top2 in .*metrics.json; change METRIC"):
        start(sweep, METRIC="val/top2", FOLDER=sweep.FOLDER / "other")


@pytest.mark.parametrize(("value", "stop"), [(89.0, 2), (91.0, 6)])
def test_a_run_that_is_worse_than_half_of_the_others_stops(sweep, monkeypatch, value, stop):
    """The former trials had 80, 90 and 100 after two iterations."""
    sweep.PRUNER = optuna.pruners.MedianPruner(n_startup_trials=3)
    study = sweep.open_study()
    for former in (80.0, 90.0, 100.0):
        trial = study.ask()
        trial.report(former, 2)
        study.tell(trial, former)
    trial = study.ask()
    monkeypatch.setenv("SWEEP_TRIAL", str(trial._trial_id))
    model = Weight()
    trainer = SimpleTrainer(model, [torch.ones(())] * 10, sgd(model))
    evaluate = hooks.EvalHook(2, lambda: {"classification": {"top1": value}})
    trainer.register_hooks([sweep.Prune(2), evaluate])
    trainer.train(0, 6)

    assert trainer.done == stop
    found = study.trials[trial.number]
    assert found.intermediate_values == {done: value for done in (2, 4) if done <= stop}
    assert found.user_attrs == ({"pruned": True} if stop == 2 else {})


def write_job(folder, *settings, config="{}"):
    """The script with these settings after its own, and the small job."""
    folder.mkdir(exist_ok=True)
    head, functions = SCRIPT.split("\n\n\n", 1)
    (folder / "sweep.py").write_text("\n".join([head, *settings, "\n", functions]))
    (folder / "train.py").write_text(TRAIN)
    (folder / "job.yaml").write_text(config)


def start_process(folder):
    """The exit code of the script, and the rows of its table."""
    done = subprocess.run(
        [sys.executable, "sweep.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the kill of its group does not reach the test
    )
    return done.returncode, table(done.stdout)


def weights_of(folder):
    """Those of the one run, at its end."""
    (file,) = folder.glob("output/sweep/*/model_final.pth")
    return torch.load(file, weights_only=True)["model"]


@pytest.mark.slow
def test_a_killed_trial_goes_on_from_its_checkpoint_to_the_same_result(tmp_path):
    settings = [
        "COMMAND = [sys.executable, 'train.py', '--resume']",
        "SPACE = {'SOLVER.BASE_LR': CategoricalDistribution([0.1])}",
        "REPEATS = [{}]",
    ]
    for name in ("whole", "the run", "the sweep"):
        write_job(tmp_path / name, *settings)
    whole = start_process(tmp_path / "whole")
    assert whole[1][0][-2] == "complete"
    assert (tmp_path / "whole/starts").read_text().split() == ["0"]

    for killed in ("the run", "the sweep"):
        folder = tmp_path / killed
        (folder / "kill").write_text(killed)
        exit_code, rows = start_process(folder)
        if killed == "the run":
            assert [row[-2] for row in rows] == ["fail"]
        else:
            assert exit_code == -signal.SIGKILL
        assert start_process(folder) == whole
        assert (folder / "starts").read_text().split() == ["0", "5"]
        found = weights_of(folder)
        for name, weight in weights_of(tmp_path / "whole").items():
            assert torch.equal(found[name], weight)


@pytest.mark.slow
def test_a_bad_trial_stops_in_its_first_run_and_is_not_repeated(
    sweep, tmp_path, monkeypatch, capsys
):
    write_job(tmp_path, "PRUNER = optuna.pruners.MedianPruner(n_startup_trials=1)", config=PRUNING)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sweep.SPACE = {"SOLVER.BASE_LR": sweep.CategoricalDistribution([0.1, 0.2])}
    good = optuna.trial.create_trial(
        value=200,
        params={"SOLVER.BASE_LR": 0.1},
        distributions=sweep.SPACE,
        user_attrs={"folder": "good", "values": [200]},
        intermediate_values={4: 200},
    )
    sweep.open_study().add_trial(good)
    command = [sys.executable, "train.py", "--resume"]
    for _ in range(2):
        start(sweep, COMMAND=command, REPEATS=[{"SEED": 1}, {"SEED": 2}])
        states = [row[-2] for row in table(capsys.readouterr().out)]
        assert states == ["complete", "pruned"]
    (folder,) = (path for path in sweep.FOLDER.iterdir() if path.is_dir())
    assert [path.name for path in folder.iterdir()] == ["SEED=1"]
    rows = (folder / "SEED=1/metrics.json").read_text().splitlines()
    assert json.loads(rows[-1])["iteration"] == 3
    assert (tmp_path / "starts").read_text().split() == ["0"]
