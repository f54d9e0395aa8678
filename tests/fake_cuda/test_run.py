"""The acceptance run on the fake device, with all tests marked ``cuda``."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fake_cuda.build import build
from tests.fake_cuda.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="this torch has a real CUDA device of its own"
    ),
    pytest.mark.skipif(shutil.which("c++") is None, reason="the fake device needs a C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="the fake device is built for Linux"),
]


def test_the_acceptance_run_has_no_false_row_and_skips_no_test(tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
    }
    environment["FAKE_CUDA"] = str(build(tmp_path))
    command = [sys.executable, "-m", "tests.fake_cuda.accept"]
    found = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-5_000:]
    assert not re.search(r"\d+ skipped", found.stdout), found.stdout


def test_the_text_of_each_mutant_is_in_the_source_once():
    texts = [(file, old) for file, mutants in MUTANTS.items() for _, old, _, _ in mutants]
    assert len(texts) == 39
    assert [(file, old) for file, old in texts if (ROOT / file).read_text().count(old) != 1] == []
