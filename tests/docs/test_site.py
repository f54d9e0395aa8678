"""The pages and the reference are built without a warning."""

import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

for needed in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(needed, reason="pip install -e '.[docs]'")


@pytest.mark.slow
def test_the_site_is_built(tmp_path):
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "docs",
        tmp_path,
    ]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
