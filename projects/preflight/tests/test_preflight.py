"""Jobs with planted mistakes, and jobs without."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from trainkit.projects.preflight.job import Watcher

from tests.cuda import needs_cuda
from tests.docs.pages import blocks, page
from tests.forked import run_forked, script
from trainkit.engine import SimpleTrainer

PAGE = "docs/preflight.md"
(OWN,) = blocks(PAGE, "python")
JOB = Path(__file__).with_name("planted.py")
CLIP = ["SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "full_model"]
CLIP += ["SOLVER.CLIP_GRADIENTS.CLIP_VALUE"]
ADAMW = ["SOLVER.OPTIMIZER.NAME", "AdamW", "SOLVER.OPTIMIZER.BETAS", "[0.9, 0.98]", "SOLVER.BASE_LR", 0.01]
LONG = ["SOLVER.MAX_ITER", 10**10, "SOLVER.WARMUP_ITERS", 9 * 10**9, "SOLVER.CHECKPOINT_PERIOD", 1]
LONG += ["CHECKPOINT.MAX_TO_KEEP", 10**9]


def preflight(folder, *options):
    """Exit code, name -> verdict, and what was printed."""
    done = run_forked(script(JOB, "--preflight-json", "found.json", *options, "OUTPUT_DIR", "out"), folder)
    found = json.loads((folder / "found.json").read_text())
    assert not (folder / "out").exists()
    return done.returncode, {finding["name"]: finding["verdict"] for finding in found}, done.stdout


def problems(verdicts):
    return {name for name, verdict in verdicts.items() if verdict not in ("sound", "not asked")}


@pytest.mark.slow
def test_a_sound_job_is_sound_and_nothing_is_written(tmp_path):
    code, verdicts, text = preflight(tmp_path, "--preflight")
    assert (code, problems(verdicts)) == (0, set()), text
    assert {"reproducible", "resumes"} <= verdicts.keys()
    assert [name for name in verdicts if f"`{name}`" not in page(PAGE)] == []
    assert text.endswith("The job is sound.\n")


@pytest.mark.parametrize(
    ("plant", "names", "options"),
    [
        ("shuffled labels", "labels", []),
        ("overlap", "overlap", []),
        ("early optimizer", "optimizer", []),
        ("eval mode", "modes", []),
        ("detached", "runs", []),
        ("rate", "learns", ["SOLVER.BASE_LR", 100]),
        ("normalized twice", "values", []),
        ("frozen", "frozen", []),
        ("item", "host_reads", []),
        ("typo", "settings", ["MODEL.HIDEN", 64]),
        ("large outputs, dead channels, unused part", "first_loss dead gradients clipping", [*CLIP, 1e-6]),
        ("no class 3, repeated batches, idle augmentation", "classes repeats augmentation", []),
        ("unseeded augmentation", "augmentation", []),
        ("", "disk schedule decay clipping", [*LONG, "SOLVER.WEIGHT_DECAY_NORM", 0.1, *CLIP, 1e6]),
    ],
)
def test_a_planted_mistake_is_named(tmp_path, plant, names, options):
    code, verdicts, text = preflight(tmp_path, "--preflight-quick", "MODEL.PLANT", plant, *options)
    assert code == 3
    assert {*names.split()} <= problems(verdicts), text
    assert "reproducible" not in verdicts


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "name"), [("random hook", "reproducible"), ("loader without state", "resumes")])
def test_a_planted_mistake_that_only_new_processes_show_is_named(tmp_path, plant, name):
    code, verdicts, text = preflight(tmp_path, "--preflight", "MODEL.PLANT", plant)
    assert code == 3
    assert name in problems(verdicts), text


@pytest.mark.parametrize(
    ("plant", "options", "not_asked"),
    [
        ("no labels", ADAMW, "overlap, classes"),  # a test set with the inputs of a training set without labels
        ("own step", [], "gradients, dead, host_reads, loader"),
    ],
)
def test_what_only_looks_like_a_mistake_is_sound(tmp_path, plant, options, not_asked):
    code, verdicts, text = preflight(tmp_path, "--preflight-quick", "MODEL.PLANT", plant, *options)
    assert (code, problems(verdicts), verdicts[not_asked]) == (0, set(), "not asked"), text


def test_a_finding_is_allowed_by_its_name(tmp_path):
    options = ["--preflight-quick", "--preflight-allow", "frozen", "MODEL.PLANT", "frozen"]
    code, verdicts, text = preflight(tmp_path, *options)
    assert (code, problems(verdicts)) == (0, {"frozen"}), text
    assert "look at this (allowed)" in text
    done = run_forked(script(JOB, "--preflight-quick", "--preflight-allow", "frzen"), tmp_path)
    assert (done.returncode, "no finding is called frzen" in done.stderr) == (2, True)


def test_a_check_of_ones_own_is_asked(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_check.py").write_text(OWN)
    options = ["--preflight-quick", "IMPORTS", "[own_check]"]
    code, verdicts, text = preflight(tmp_path, *options)
    assert (code, verdicts["epochs"]) == (3, "look at this"), text


@pytest.mark.slow
def test_several_processes_are_compared_with_one(tmp_path):
    """Their loss is smaller, and batch norm has other statistics in each process."""
    options = ["--num-gpus", "2", "--preflight-allow", "first_loss", "MODEL.PLANT", "sum"]
    code, verdicts, text = preflight(tmp_path, "--preflight", *options)
    assert (code, problems(verdicts)) == (3, {"first_loss", "processes"}), text
    assert "different among them: buffers" in text


@needs_cuda
def test_on_a_gpu_waits_that_the_dispatcher_does_not_see_are_found():
    class Masked(nn.Linear):
        def forward(self, batch):
            return super().forward(batch)[batch[:, 0] > 0].sum()

    batch, model, watcher = torch.ones(2, 4, device="cuda"), Masked(4, 1).cuda(), Watcher()
    watcher.step(SimpleTrainer(model, [batch], torch.optim.SGD(model.parameters(), lr=0.1)), batch)
    assert {read.rpartition(":")[0] for read in watcher.reads} == {f"a wait at {__file__}"}
