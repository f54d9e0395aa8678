"""The table of defects names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
ISSUES = {
    "A step that costs nothing",
    "Many processes, many machines",
    "Made for people: documentation, pictures, messages",
}


@cache
def functions(path):
    return {node.name for node in ast.parse((TESTS / path).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_of_the_46_defects_names_tests_that_exist_or_the_issue_that_will_bring_them():
    rows = re.findall(r"^\| (\d+) \| .+? \| (.+) \|$", (TESTS / "defects.md").read_text(), re.MULTILINE)
    tests = [(number, *test.split("::")) for number, caught_by in rows for test in re.findall(r"`(.+?)`", caught_by)]
    issues = [(number, issue) for number, caught_by in rows for issue in re.findall(r"\*(.+?)\*", caught_by)]

    assert [int(number) for number, _ in rows] == list(range(1, 47))
    assert [row for row in tests if row[2] not in functions(row[1])] == []
    assert [row for row in issues if row[1] not in ISSUES] == []
    assert {number for number, _ in rows} == {number for number, *_ in [*tests, *issues]}
