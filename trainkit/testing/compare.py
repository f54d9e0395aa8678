"""The first difference between two runs that must be equal, and what its cause may be."""

import itertools
from collections.abc import Iterable
from pathlib import Path

from trainkit.checkpoint.differences import (
    CLOCK_READINGS,
    differing_checkpoints,
    differing_metrics,
)
from trainkit.testing.record import Attributes, Call, Record

_MAX_NAMES = 3
# field of a call -> what it is
_PARTS = {"drawn": "the random numbers", "batch": "the batch", "losses": "the losses"}


class Difference:
    """Where a run differs from one that must be equal.

    Attributes:
        found: descriptions of the first call, metric and entry of a checkpoint that differ; empty
            if the runs are equal.
        number: of the calls that are equal before the first one that differs.
        part: the field of `Call` in which the first call differs; "" if all calls are equal;
            "call" if another point is called.
    """

    def __init__(
        self, whole: Record, run: Record, folders: tuple[Path, Path], ignore: Iterable[str]
    ) -> None:
        self.expected = whole.once()[run.before or 0 :]
        self.got = run.once()
        self.number = 0
        self.part = ""
        self.found: list[str] = []
        self._compare_calls()
        left, right = map(str, folders)
        readings = {*CLOCK_READINGS, *ignore}
        self.metric = next(differing_metrics(left, right, readings), "")
        if self.metric:
            self.found.append(f"first line of metrics that differs: {self.metric}")
        self.entry = next(differing_checkpoints(left, right, readings), "")
        if self.entry:
            self.found.append(f"first entry of a checkpoint that differs: {self.entry}")

    def _compare_calls(self) -> None:
        nothing: tuple[Call, Attributes] = (Call("", "", -1), {})
        pairs = itertools.zip_longest(self.expected, self.got, fillvalue=nothing)
        for (call, _), (other, _) in pairs:
            if call != other:
                break
            self.number += 1
        else:
            return
        if call[:4] != other[:4]:
            self.part = "call"
            texts = [str(each) if each.point else "the end of the run" for each in (call, other)]
            self.found.append(f"first call that differs: {texts[0]}; and {texts[1]}")
            return
        self.part = next(name for name in _PARTS if getattr(call, name) != getattr(other, name))
        text = f"first call that differs: {call}: {_PARTS[self.part]}"
        if self.part == "losses":
            text += f": {call.losses}; and {other.losses}"
        self.found.append(text)

    def attributes(self) -> dict[str, tuple[str, str]]:
        """The attributes of the user's classes that differ from the first common call on."""
        pairs = list(zip(self.expected, self.got, strict=False))[: self.number + 1]
        if not pairs:
            return {}
        names = dict.fromkeys(pairs[0][0][1])
        kept = {}
        for name in names:
            values = [(mine.get(name), other.get(name)) for (_, mine), (_, other) in pairs]
            if all(value != other for value, other in (values[0], values[-1])):
                kept[name] = (str(values[0][0]), values[0][1] or "not set")
        return kept


def likely_cause(difference: Difference, whole: Record, run: Record) -> str:
    """What may cause the difference between a run and its resumed part, and what to do."""
    causes = []
    drawn = whole.drawn_at_start() | run.drawn_at_start()
    attributes = list(difference.attributes().items())
    for name, (value, other) in attributes[:_MAX_NAMES]:
        owner, _, attribute = name.partition(".")
        text = f"{owner} does not save its attribute {attribute!r} ({value} and {other})"
        if name in drawn:
            text += ", a draw in before_train, which a resumed run calls again"
        causes.append(f"{text}: return it from state_dict()")
    if difference.part == "drawn":
        place = _place_of_draw(difference)
        causes.insert(0, f"one of the runs draws random numbers that the other does not, {place}")
    elif difference.part == "batch":
        causes.insert(
            0,
            "the data: a loader without state_dict(), or a random generator of the dataset's own, "
            "which is not saved; draw from the global generators, which are restored",
        )
    causes += run.inexact
    if not causes:
        causes.append(
            "no attribute of a hook and no random number tells it: an optimizer, a schedule or a "
            "module that is no public attribute of the trainer, a buffer that is not persistent, a "
            "variable of a module, or a run that is not deterministic"
        )
    return "; ".join(causes)


def _place_of_draw(difference: Difference) -> str:
    """Between which calls the random numbers begin to differ."""
    call, _ = difference.expected[difference.number]
    if difference.number == 0:
        return f"before {call}"
    before, _ = difference.expected[difference.number - 1]
    if (before.point, before.iteration) == (call.point, call.iteration):
        return f"in the {call.point} of a hook in iteration {call.iteration}"
    return (
        f"between {before.point} of iteration {before.iteration} and {call.point} of iteration "
        f"{call.iteration}"
    )
