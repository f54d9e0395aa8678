"""The reference of the config, docs/config.md and parts of the READMEs of projects."""

from functools import reduce

import pytest

from tools.config_reference import describe_keys, pages
from trainkit.config import CfgNode, get_cfg
from trainkit.utils.plugins import CONFIG_KEYS


def leaves(node, prefix=""):
    for key, value in node.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, CfgNode) else [(prefix + key, value)]


@pytest.mark.parametrize(("page", "text"), [*pages()], ids=[path.parent.name for path, _ in pages()])
def test_a_page_is_what_the_tool_writes_now(page, text):
    assert page.read_text() == text  # else: python tools/config_reference.py


def test_every_key_is_there_with_its_default():
    described = {key: default for _, key, default, _ in describe_keys()}
    cfg = get_cfg()
    for key in CONFIG_KEYS:
        reduce(getattr, key.split("."), cfg)  # lets its project declare it
    assert {key: value for key, value in described.items() if not isinstance(value, CfgNode)} == dict(leaves(cfg))
