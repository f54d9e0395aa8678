"""The pages of the documentation, and the code on them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def page(name):
    return (ROOT / name).read_text()


def blocks(name, language):
    """The code of a page in one language, in its order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page(name), re.DOTALL | re.MULTILINE)


def run(source, where, **names):
    """What a block defines."""
    names.setdefault("__name__", "page")
    exec(compile(source, where, "exec"), names)
    return names
