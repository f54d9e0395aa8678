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
    return Finding(name, verdict, text, advice) if is_bad else Finding(name, "sound", text)


def some(names: Iterable[object]) -> str:
    """The first names of a list, and how many more there are."""
    texts = [*map(str, names)]
    return (", ".join(texts[:3]) or "none") + (
        f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    )
