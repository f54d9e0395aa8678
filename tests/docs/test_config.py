"""The reference of the config, docs/config.md."""

from functools import reduce
from pathlib import Path

import pytest

from tests.forked import run_forked, script
from tools import config_reference
from tools.config_reference import describe_keys, pages
from trainkit.config import CfgNode, get_cfg
from trainkit.utils.plugins import CONFIG_KEYS

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def leaves(node, prefix=""):
    for key, value in node.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, CfgNode) else [(prefix + key, value)]


@pytest.mark.parametrize(("page", "text"), [*pages()], ids=[path.parent.name for path, _ in pages()])
def test_a_page_is_what_the_tool_writes_now(page, text):
    assert page.read_text() == text  # else: python tools/config_reference.py


def test_every_key_is_there_with_its_default_and_a_meaning():
    described = {key: default for _, key, default, _ in describe_keys()}
    cfg = get_cfg()
    for key in CONFIG_KEYS:
        reduce(getattr, key.split("."), cfg)  # lets its project declare it

    assert {key: value for key, value in described.items() if not isinstance(value, CfgNode)} == dict(leaves(cfg))


@pytest.mark.parametrize("row", ["| `SOLVER.MAX_ITER` ", "| `SOLVER.AMP.LOSS_SCALE` ", "| **SOLVER.OPTIMIZER** "])
def test_a_row_of_each_kind_is_on_the_page_once(row):
    assert PAGE.read_text().count(row) == 1


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("docs/config.md", 2)])
def test_the_tool_tells_what_it_is_for_and_takes_no_argument(tmp_path, argument, code):
    done = run_forked(script(config_reference.__file__, argument), tmp_path)
    assert done.returncode == code
    if code:
        assert (done.stdout, done.stderr.splitlines()[-1].partition("error: ")[2]) == (
            "",
            f"unrecognized arguments: {argument}",
        )
    else:
        assert config_reference.__doc__ in done.stdout
