"""The tests of docs/testing.md pass, and a fault gives the error that the page shows."""

import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, blocks, fences, page, run

TESTS, CONFTEST, HOOK = blocks("docs/testing.md", "python")
(ERROR,) = [code for language, code in fences(page("docs/testing.md")) if not language]
FAULT = """
from trainkit.engine import HookBase


class Count(HookBase):
    def __init__(self):
        self.count = 0

    def after_step(self):
        self.count += 1
        self.trainer.storage.put_scalar("count", self.count)


def counting(folder):
    trainer = my_trainer(folder)
    trainer.register_hooks([Count()])
    return trainer


def test_counting(tmp_path):
    assert_resumes_exactly(counting, tmp_path, kills=1)
"""


def without_numbers(text):
    return re.sub(r"\d+(\.\d+)?", "#", text)


def test_the_test_of_a_hook_passes_and_fails_with_another_hook():
    names = run(HOOK, "docs/testing.md")
    names["test_the_hook_counts_the_samples"]()
    names["CountSamples"].after_step = lambda hook: None
    with pytest.raises(KeyError):
        names["test_the_hook_counts_the_samples"]()


@pytest.mark.slow
def test_the_tests_of_the_page_pass_and_a_counter_without_a_state_is_found(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_job.py").write_text(TESTS + FAULT)
    (tmp_path / "projects").symlink_to(ROOT / "projects")
    command = [sys.executable, "-m", "pytest", "--strict-markers", "-rfp", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "test_job.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "2 passed" in done.stdout, done.stdout
    [text] = re.findall(r"^E +AssertionError: (killed at event .*(?:\nE .*)+)", done.stdout, re.M)
    lines = [line.removeprefix("E").strip() for line in text.splitlines()]
    assert [without_numbers(line) for line in lines] == [
        without_numbers(line) for line in ERROR.splitlines()
    ]
