"""Twelve jobs with one planted mistake each, and two without."""

import json
from pathlib import Path

import pytest
import trainkit.projects.preflight.checks  # noqa: F401
from trainkit.projects.preflight.findings import PREFLIGHT_REGISTRY

from tests.docs.pages import blocks, page
from tests.forked import run_forked, script

PAGE = "docs/preflight.md"
(OWN,) = blocks(PAGE, "python")
JOB = Path(__file__).with_name("planted.py")


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
    assert (code, problems(verdicts)) == (0, set())
    assert {"reproducible", "resumes"} <= verdicts.keys()
    assert text.endswith("The job is sound.\n")


@pytest.mark.parametrize(
    ("plant", "name", "options"),
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
    ],
)
def test_a_planted_mistake_is_named(tmp_path, plant, name, options):
    code, verdicts, text = preflight(tmp_path, "--preflight-quick", "MODEL.PLANT", plant, *options)
    assert code == 3
    assert name in problems(verdicts), text
    assert "reproducible" not in verdicts


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "name"), [("random hook", "reproducible"), ("loader without state", "resumes")])
def test_a_planted_mistake_that_only_new_processes_show_is_named(tmp_path, plant, name):
    code, verdicts, text = preflight(tmp_path, "--preflight", "MODEL.PLANT", plant)
    assert code == 3
    assert name in problems(verdicts), text


def test_what_only_looks_like_a_mistake_is_sound(tmp_path):
    """Arguments of an optimizer; a test set with the inputs of a training set without labels."""
    options = ["SOLVER.OPTIMIZER.NAME", "AdamW", "SOLVER.OPTIMIZER.BETAS", "[0.9, 0.98]", "SOLVER.BASE_LR", 0.01]
    code, verdicts, text = preflight(tmp_path, "--preflight-quick", "MODEL.PLANT", "no labels", *options)
    assert (code, problems(verdicts)) == (0, set()), text


def test_a_finding_is_allowed_by_its_name(tmp_path):
    options = ["--preflight-quick", "--preflight-allow", "frozen", "MODEL.PLANT", "frozen"]
    code, verdicts, text = preflight(tmp_path, *options)
    assert (code, problems(verdicts)) == (0, {"frozen"}), text
    assert "look at this (allowed)" in text
    done = run_forked(script(JOB, "--preflight-quick", "--preflight-allow", "frzen"), tmp_path)
    assert (done.returncode, "there is no check frzen" in done.stderr) == (2, True)


def test_a_check_of_ones_own_is_asked(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_check.py").write_text(OWN)
    options = ["--preflight-quick", "IMPORTS", "[own_check]"]
    code, verdicts, text = preflight(tmp_path, *options)
    assert (code, verdicts["clipping"]) == (3, "look at this"), text


def test_the_page_names_all_questions():
    assert [name for name, _ in PREFLIGHT_REGISTRY if f"`{name}`" not in page(PAGE)] == []
