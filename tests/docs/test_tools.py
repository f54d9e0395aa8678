"""The commands of docs/tools.md, run after a short run of the default job, do what the pages show."""

import re
import shlex

import pytest

from tests.docs.pages import ROOT, page, tool_of
from tests.tools.command import call
from tests.tools.digits_run import OPTIONS
from tools import train_net
from trainkit.engine import default_argument_parser
from trainkit.utils.logger import close_logger

PAGE = page("docs/tools.md")
# a command, and what stands after it until the next one
COMMANDS = [
    (line, shown)
    for block, shown in re.findall(r"```bash\n(.*?)```\n(?:\n```\n(.*?)```)?", PAGE, re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands are run."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "projects").symlink_to(ROOT / "projects")
    changed = [
        "SOLVER.MAX_ITER",
        "8",
        "SOLVER.CHECKPOINT_PERIOD",
        "2",
        "TEST.EVAL_PERIOD",
        "2",
        "MODEL.WIDTH",
        "16",
    ]
    changed += [
        "CHECKPOINT.BEST_METRIC",
        "classification/top1",
        "OUTPUT_DIR",
        str(folder / "output/digits"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["tools/train_net.py"])
        patch.setattr("__main__.__spec__", None)  # not by python -m pytest
        train_net.main(default_argument_parser().parse_args([*map(str, OPTIONS), *changed]))
    close_logger()
    return folder


def run(command, capsys):
    """What it prints, and its exit code."""
    words = shlex.split(command)
    if words[:2] == ["python", "-c"]:
        exec(words[2], {})
        return "", 0
    tool, args = tool_of(words)
    code, out, err = call(tool, capsys, *args)
    return out or err, code


def masked(text):
    """Its lines without numbers, whose values are those of another run, and without spaces and rules."""
    lines = [re.sub(r"[\d,]*\d(\.\d+)?(e-\d+)?", "#", line) for line in text.splitlines()]
    return [re.sub(r"(?<=-)-+", "", re.sub(r" +", " ", line)).strip() for line in lines]


def test_each_command_prints_what_the_page_shows(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for command, shown in COMMANDS:  # in this order: one writes the file that another one reads
        before = {path: path.stat().st_mtime_ns for path in (folder / "output").rglob("*")}

        # the last but one of both runs
        printed, code = run(command.replace("0000599", "0000005"), capsys)

        assert code == ("\ndifferent in " in shown), (command, printed)
        assert {
            path: path.stat().st_mtime_ns for path in (folder / "output").rglob("*")
        } == before, command
        if "analyze" in command:  # it depends on no run
            assert {line for line in shown.splitlines() if line != "..."} <= {*printed.splitlines()}
        lines = iter(masked(printed))
        for line in masked(shown):  # in this order
            if line != "..." and "..." not in line:
                assert line in lines, f"{command}: {line!r} is not printed, or elsewhere"
        if shown and not shown.endswith("...\n"):
            assert [*lines] == [], command


def test_every_tool_has_its_line_in_the_table():
    scripts = {path.name for path in (ROOT / "tools").glob("*.py")}
    assert set(re.findall(r"^\| `tools/(\w+\.py)` \| \w", PAGE, re.MULTILINE)) == scripts
    modules = re.findall(r"^\| `(trainkit\.projects\.[\w.]+)` \| \w", PAGE, re.MULTILINE)
    assert len(modules) == 4
    for name in modules:
        tool, _ = tool_of(["python", "-m", name])
        assert tool.parse_args.__doc__
