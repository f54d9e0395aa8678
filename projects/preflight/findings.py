"""What a check says, the registry of the checks, and the report."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trainkit.utils.logger import format_table
from trainkit.utils.registry import Registry

PREFLIGHT_REGISTRY = Registry("PREFLIGHT")
"""Functions ``check(job) -> Finding``; the order of registration is the order of the report."""


class Finding(NamedTuple):
    """The answer to a question: "sound", "look at this", "wrong" or "not asked"; what was measured; what to do."""

    verdict: str
    text: str
    advice: str = ""
    name: str = ""

    @property
    def is_sound(self) -> bool:
        return self.verdict in ("sound", "not asked")


def judge(is_bad: object, text: str, advice: str = "", verdict: str = "wrong") -> Finding:
    """A finding with this verdict, or a sound one."""
    return Finding(verdict, text, advice) if is_bad else Finding("sound", text)


def not_asked(text: str) -> Finding:
    return Finding("not asked", text)


def check(function: Callable[[Any], Finding]) -> Callable[[Any], Finding]:
    """Register a function under its name, which is that of its finding."""
    return PREFLIGHT_REGISTRY.register(function)


def some(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def report(found: Sequence[Finding], allowed: Sequence[str]) -> str:
    """A table with a line for each question, and the conclusion."""
    rows = []
    for verdict, text, advice, name in found:
        text = textwrap.fill(f"{text}: {advice}" if advice else text, 84)
        rows.append((name, verdict + " (allowed)" * (name in allowed), text))
    names = [finding.name for finding in found if not finding.is_sound and finding.name not in allowed]
    conclusion = f"Findings: {', '.join(names)}. To accept one: --preflight-allow {names[0]}" if names else ""
    return f"{format_table(rows, ('question', 'answer', 'what was found'))}\n\n{conclusion or 'The job is sound.'}"
