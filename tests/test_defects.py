"""The table of defects names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ISSUES = {
    "A step that costs nothing",
    "Many processes, many machines",
    "Made for people: documentation, pictures, messages",
}


def test_each_of_the_46_defects_names_tests_that_exist_or_the_issue_that_will_bring_them():
    trees = [
        ast.parse(path.read_text())
        for folder in ("tests", "projects")
        for path in (ROOT / folder).rglob("test_*.py")
    ]
    known = {
        node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)
    } | ISSUES
    rows = re.findall(
        r"^\| (\d+) \| .+? \| (.+) \|$", (ROOT / "tests/defects.md").read_text(), re.MULTILINE
    )
    named = {
        int(number): set(re.findall(r"[`*](.+?)[`*]", caught_by)) for number, caught_by in rows
    }
    assert [*named] == [*range(1, 47)]
    assert all(named.values())
    assert {number: names - known for number, names in named.items() if names - known} == {}
