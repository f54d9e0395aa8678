"""The tests marked ``cuda`` on the fake device: of this folder, and of all others."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

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
    """The path of the fake device; built in about 10 s."""
    path = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda_device.so"
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    lib = Path(torch.__file__).parent / "lib"
    command = ["c++", "-shared", "-fPIC", "-O0", "-w", "-std=c++20", "-DTORCH_EXTENSION_NAME=fake_cuda_device"]
    command += [f"-I{folder}" for folder in includes] + [str(HERE / "device.cpp"), "-o", str(path)]
    command += [f"-L{lib}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{lib}"]
    subprocess.run(command, check=True)
    return path


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
