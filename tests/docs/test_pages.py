"""Every block of code, every link and every config key of the documentation is looked at by a test."""

import ast
import re
from functools import reduce

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, fences, page
from tools.config_reference import describe_keys, pages
from trainkit.config import CfgNode, get_cfg

MARKDOWN = [*PAGES, "CHANGELOG.md", "tests/defects.md"]
TESTS = [path for folder in ("tests", "projects") for path in (ROOT / folder).rglob("test_*.py")]
IN_TESTS = {
    "python",
    "toml",
    "yaml",
}  # sh and bash: test_commands.py; without a language: what is printed
# a user's own, and three of detectron2
OTHERS_KEYS = {
    "INPUT.FOLD",
    "INPUT.FORMAT",
    "LOG.SAMPLES",
    "MODEL.META_ARCHITECTURE",
    "TEST.AUG",
}


def taken(source):
    """Page and language of ``A, B = blocks(page, language)`` at the top of a module that uses A and B.

    As many names as there are blocks, or the module cannot be imported: a block that is added is not forgotten.
    """
    tree = ast.parse(source)
    used = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    texts = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                texts[name] = text
            case ast.Assign(
                targets=[ast.Tuple(elts=names)],
                value=ast.Call(
                    func=ast.Name(id="blocks"), args=[where, ast.Constant(value=language)]
                ),
            ) if {name.id for name in names} <= used:
                yield (
                    (where.value if isinstance(where, ast.Constant) else texts[where.id]),
                    language,
                )


def test_every_block_is_taken_by_a_test():
    on_pages = {
        (name, language) for name in PAGES for language in IN_TESTS if blocks(name, language)
    }
    in_tests = {found for path in TESTS for found in taken(path.read_text())}
    assert on_pages - in_tests == set()

    named = "A, B = blocks('a.md', 'python')\n"
    assert [*taken(named + "run(A + B)")] == [("a.md", "python")]
    assert [*taken(named + "run(A)")] == []

    for name in MARKDOWN:
        found = fences(page(name))
        assert {language for language, _ in found} <= {
            "",
            "sh",
            "bash",
            "python",
            "toml",
            "yaml",
            "{toctree}",
        }, name
        printed = "\n".join(code for language, code in found if not language)
        assert not re.search(r"^(python|pip|torchrun) ", printed, re.MULTILINE), name


def anchors(text):
    """Those of the headings of a page, as code hosts and the site name them."""
    headings = re.findall(
        r"^#+ (.+)$",
        re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE),
        re.MULTILINE,
    )
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def broken_links(path):
    """Links of a file to files, folders or headings that are not there."""
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, place = link.partition("#")
        target = path.parent / file if file else path
        if re.match("https?:", link):
            continue
        if not target.exists() or (place and place not in anchors(target.read_text())):
            yield link


def test_links_lead_to_files_and_headings_that_are_there(tmp_path):
    assert {name: broken for name in MARKDOWN if (broken := [*broken_links(ROOT / name)])} == {}
    (tmp_path / "a.md").write_text(
        "# An `a`, at last\n[b](b.md) [c](#c) [a](a.md#an-a-at-last) [d](a.md#d) [e](https://e)"
    )
    assert [*broken_links(tmp_path / "a.md")] == ["b.md", "#c", "a.md#d"]


def test_every_key_that_a_page_names_is_there():
    named = {
        key for name in PAGES for key in re.findall(r"`([A-Z][A-Z_]+(?:\.[A-Z_]+)+)", page(name))
    }
    assert len(named) > 100
    cfg = get_cfg()
    for key in named - OTHERS_KEYS:
        reduce(getattr, key.split("."), cfg)
    with pytest.raises(AttributeError):
        reduce(getattr, ["SOLVER", "BASE_LRS"], cfg)


def leaves(node, prefix=""):
    for key, value in node.items():
        yield from (
            leaves(value, f"{prefix}{key}.")
            if isinstance(value, CfgNode)
            else [(prefix + key, value)]
        )


def test_every_key_is_there_with_its_default_and_the_pages_are_what_the_tool_writes_now():
    described = {key: default for _, key, default, _ in describe_keys()}
    cfg = get_cfg()
    assert {
        key: value for key, value in described.items() if not isinstance(value, CfgNode)
    } == dict(leaves(cfg))
    # else: python tools/config_reference.py
    assert [str(page) for page, text in pages() if page.read_text() != text] == []
