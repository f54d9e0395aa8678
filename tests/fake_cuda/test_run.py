"""The tests marked ``cuda`` on the fake device: of this folder, and of all others."""

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

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a real CUDA device of its own"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="the fake device needs a C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="the fake device is built for Linux"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("fake_cuda"))


def test_all_tests_that_need_a_gpu_pass_on_the_fake_one(library, tmp_path):
    paths = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "projects").rglob("test_*.py")]
    files = [str(path) for path in paths if "needs_cuda" in path.read_text()]
    options = ["-p", "tests.fake_cuda.device", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "cuda", "-rs"]
    command = [sys.executable, "-m", "pytest", *options, f"--basetemp={tmp_path / 'tests'}", *sorted(files)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    found = subprocess.run(
        command, env=environment | {"FAKE_CUDA": str(library)}, cwd=ROOT, capture_output=True, text=True
    )

    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-5_000:]
    assert not re.search(r"\d+ skipped", found.stdout), found.stdout[-5_000:]


def test_the_text_of_each_mutant_is_in_the_source_once():
    texts = [(file, old) for file, mutants in MUTANTS.items() for _, old, _, _ in mutants]
    assert len(texts) == 30
    assert [(file, old) for file, old in texts if (ROOT / file).read_text().count(old) != 1] == []
