"""The README cannot drift from what is run."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_two_commands_are_those_that_ci_takes_from_the_readme():
    script = (ROOT / ".ci/run").read_text()
    pattern = re.search(r"^grep -E '(.+)' README.md", script, re.MULTILINE)[1]
    found = subprocess.run(["grep", "-E", pattern, ROOT / "README.md"], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [
        "pip install -e . && python tools/train_net.py",
        "pip install -e '.[test]' && pytest -n auto --dist loadfile",
    ]


def test_the_python_of_the_readme_is_python():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        ast.parse(block)


def test_the_files_that_the_readme_links_to_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists()
