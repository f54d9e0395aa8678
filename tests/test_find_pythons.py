"""The Pythons that a CI run finds on a machine."""

import os
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci/find_pythons.py"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with only these programs: path -> the lines that it prints, or None if it fails."""

    def machine(programs):
        for name, lines in programs.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            prints = [f"echo '{line}'" for line in lines or []]
            file.write_text("\n".join(["#!/bin/sh", *prints, f"exit {int(lines is None)}"]))
            file.chmod(0o755)
        folders = sorted({str(tmp_path / name.split("/")[0]) for name in programs})
        monkeypatch.setenv("PATH", os.pathsep.join([*folders, "/no/such/folder"]))

    return machine


def found():
    return runpy.run_path(str(SCRIPT))["find_pythons"]()


def test_the_newest_of_each_minor_version_is_found_on_the_path_and_in_pyenv(machine, tmp_path):
    own = " ".join(map(str, sys.version_info[:3]))
    machine(
        {
            "a/python3.10": ["cpython", "3 10 9", "/a/python3.10"],
            "a/python3.9": ["cpython", "3 9 18", "/a/python3.9"],
            "a/python3.8": None,  # a shim of pyenv without a version
            "a/python3.10-config": ["3.10"],
            "a/python3.99": ["cpython", "3 99 0", "/a/python3.99"],
            "b/python3.98": ["pypy", "3 98 0", "/b/pypy"],
            "b/python3.97": ["cpythont", "3 97 0", "/b/free-threaded"],
            "b/python3.96": ["cpython", own, "/b/own"],
            "b/pyenv": [str(tmp_path / "pyenv root")],
            "pyenv root/versions/3.10.13/bin/python": ["cpython", "3 10 13", "/p/3.10.13/python"],
            "pyenv root/versions/3.99.0/bin/python": ["cpython", "3 99 0", "/p/3.99.0/python"],
            "pyenv root/versions/2.7.18/bin/python": ["cpython", "2 7 18", "/p/2.7.18/python"],
        }
    )
    assert found() == [((3, 10, 13), "/p/3.10.13/python"), ((3, 99, 0), "/p/3.99.0/python")]


def test_a_machine_without_pyenv_or_another_python_is_no_error(machine):
    machine({"a/python3.99": ["cpython", "3 99 1", "/a/python3.99"]})
    assert found() == [((3, 99, 1), "/a/python3.99")]
    machine({"a/python3.99": None})
    assert found() == []
