"""The pages and the reference are built without a warning, and their links lead to what is there."""

import re
import subprocess
import sys
from urllib.parse import unquote

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow

for needed in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(needed, reason="pip install -e '.[docs]'")


def broken_links(site):
    """Links of the site to files or places that it does not have, and what it would load from elsewhere."""
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    ids = {path: set(re.findall(r'id="([^"]+)"', text)) for path, text in pages.items()}
    for path, text in pages.items():
        for kind, link in re.findall(r'<(a|img|link|script)\b[^>]*? (?:href|src)="([^"]*)"', text):
            file, _, place = unquote(re.sub(r"\?.*", "", link)).partition("#")
            target = (path.parent / file).resolve() if file else path
            if link.startswith("http"):
                if kind != "a":
                    yield link
            elif not target.exists() or (place and target in ids and place not in ids[target]):
                yield f"{path.relative_to(site)}: {link}"


def test_the_site_is_built_and_its_links_lead_to_what_is_there(tmp_path):
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", tmp_path]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert [*broken_links(tmp_path)] == []

    control = tmp_path / "control"
    control.mkdir()
    (control / "a.html").write_text('<a href="b.html"><img src="https://x/y.png"><a href="#c"><a href="#d" id="d">')
    assert [*broken_links(control)] == ["a.html: b.html", "https://x/y.png", "a.html: #c"]
