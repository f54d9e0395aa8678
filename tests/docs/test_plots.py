"""The commands of docs/plots.md do what the page says."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/plots.md").read_text()
COMMANDS = re.findall(r"^python tools/plot_metrics.py (.+)$", TEXT, re.MULTILINE)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.chdir(tmp_path)
    for name in ("sgd", "adamw"):
        (tmp_path / "output" / name).mkdir(parents=True)
        (tmp_path / "output" / name / "metrics.json").write_text('{"iteration": 19, "total_loss": 1.0}\n')
    return importlib.import_module("plot_metrics")


@pytest.mark.parametrize(
    ("command", "files"), [*zip(COMMANDS, (["output/sgd/metrics.png"], ["compare.html"]), strict=True)]
)
def test_each_command_writes_what_the_page_says(tool, tmp_path, command, files):
    if "--html" not in command:
        pytest.importorskip("matplotlib")

    written = tool.main(tool.parse_args(shlex.split(command)))

    assert [(tmp_path / file).resolve() for file in written] == [tmp_path / file for file in files]
