"""What a check says, and the registry of the checks."""

from collections.abc import Iterable
from typing import NamedTuple

from trainkit.utils.registry import Registry

PREFLIGHT_REGISTRY = Registry("PREFLIGHT")
"""Functions ``check(job)`` that return a finding, or yield several; the order of registration is that of the report."""

check = PREFLIGHT_REGISTRY.register
LOOK = "look at this"


class NotAsked(Exception):
    """A check raises this with the reason, and the names of the questions, if these do not fit the job."""


class Finding(NamedTuple):
    """The answer to a question: "sound", "look at this", "wrong" or "not asked"; what was measured; what to do."""

    name: str
    verdict: str
    text: str
    advice: str = ""


def judge(
    name: str, is_bad: object, text: str, advice: str = "", verdict: str = "wrong"
) -> Finding:
    """A finding with this verdict, or a sound one."""
    if not is_bad:
        return Finding(name, "sound", text)
    return Finding(name, verdict, text, advice)


def some(names: Iterable[object]) -> str:
    """The first names of a list, and how many more there are."""
    texts = [*map(str, names)]
    if not texts:
        return "none"
    text = ", ".join(texts[:3])
    if len(texts) > 3:
        text += f" and {len(texts) - 3} more"
    return text
