"""The reference of the config, docs/config.md and parts of the READMEs of projects."""

from functools import reduce

from tools.config_reference import describe_keys, pages
from trainkit.config import CfgNode, get_cfg
from trainkit.utils.plugins import CONFIG_KEYS


def leaves(node, prefix=""):
    for key, value in node.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, CfgNode) else [(prefix + key, value)]


def test_every_key_is_there_with_its_default_and_the_pages_are_what_the_tool_writes_now():
    described = {key: default for _, key, default, _ in describe_keys()}
    cfg = get_cfg()
    for key in CONFIG_KEYS:
        reduce(getattr, key.split("."), cfg)  # lets its project declare it
    assert {key: value for key, value in described.items() if not isinstance(value, CfgNode)} == dict(leaves(cfg))
    # else: python tools/config_reference.py
    assert [str(page) for page, text in pages() if page.read_text() != text] == []
