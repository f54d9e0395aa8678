"""The README cannot drift from what is run; its links and commands are looked at in tests/docs."""

import inspect
import json
import re
import subprocess

import pytest
import torch

from tests.docs.pages import ROOT, blocks, run
from trainkit.engine import SimpleTrainer, TrainerBase
from trainkit.engine.hooks import HOOK_REGISTRY

LOOP, JOB = blocks("README.md", "python")


def test_the_two_commands_are_those_that_ci_takes_from_the_readme_and_the_slow_tests_are_run_too():
    script = (ROOT / ".ci/run").read_text()
    pattern = re.search(r"^grep -E '(.+)' README.md", script, re.MULTILINE)[1]
    found = subprocess.run(
        ["grep", "-E", pattern, ROOT / "README.md"], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == [
        "pip install -e . && python tools/train_net.py",
        "pip install -e '.[test]' && pytest -n auto --dist loadfile",
    ]
    assert script.endswith("\npytest -n auto --dist loadfile -m slow\n")


def test_the_loop_in_short_is_that_of_the_source():
    source = inspect.getsource(TrainerBase.train) + inspect.getsource(TrainerBase._run_iterations)
    in_short = [
        line.partition("  #")[0].strip()
        for line in LOOP.splitlines()
        if not line.startswith("while")
    ]
    assert [line for line in in_short if line not in source] == []


@pytest.fixture
def registry(monkeypatch):
    """The hooks, to which a test may add some."""
    monkeypatch.setattr(HOOK_REGISTRY, "_objects", {**HOOK_REGISTRY._objects})


@pytest.mark.usefixtures("registry", "catalogs")
def test_the_job_learns_as_the_text_says_and_the_config_names_its_hook(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["mine.py"])
    run(JOB, "mine.py", __name__="__main__")
    printed = capsys.readouterr().out
    top1 = float(re.findall(r"\| classification \| top1 +\| +(\S+) \|", printed)[-1])
    assert top1 == pytest.approx(98, abs=2)
    assert "The run has finished after 400 of 400 iterations" in printed
    lines = (tmp_path / "output/mine/metrics.json").read_text().splitlines()
    assert {json.loads(line).get("batch_size") for line in lines[:-1]} == {50}


@pytest.mark.usefixtures("registry", "catalogs")
def test_the_hook_is_registered_in_code_too():
    names = run(JOB, "mine.py")
    loader = torch.utils.data.DataLoader(names["samples"], batch_size=24)
    model = names["Trainer"].build_model(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SimpleTrainer(model, loader, optimizer)
    trainer.register_hooks([names["ShowBatchSize"]()])
    trainer.train(0, 10)
    assert trainer.storage.history("batch_size").values() == [(24, iter) for iter in range(10)]
