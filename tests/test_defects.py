"""The table of defects names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ISSUES = {
    "A step that costs nothing",
    "Many processes, many machines",
    "Made for people: documentation, pictures, messages",
}
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", (TESTS / "defects.md").read_text(), re.MULTILINE)


def test_every_defect_has_its_row():
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 47))


@pytest.mark.parametrize(("number", "caught_by"), [(number, caught_by) for number, _, caught_by in ROWS])
def test_a_row_names_tests_that_exist_or_the_issue_that_will_bring_them(number, caught_by):
    tests, issues = re.findall(r"`(.+?)`", caught_by), re.findall(r"\*(.+?)\*", caught_by)
    assert tests or issues
    assert set(issues) <= ISSUES
    for test in tests:
        path, name = test.split("::")
        tree = ast.parse((TESTS / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
