"""The confusion matrices in a run's ``inference/confusion_<dataset>.json``, as tables."""

import json
import logging
from dataclasses import dataclass
from html import escape
from pathlib import Path

logger = logging.getLogger(__name__)

_MOST_CLASSES = 30  # a larger table would not fit
_MOST_NUMBERS = 12  # in a larger table the numbers are only in the tooltips


@dataclass(frozen=True)
class Confusion:
    """
    Attributes:
        matrix: the number of samples, by true class and predicted class.
    """

    dataset: str
    classes: list[str]
    matrix: list[list[int]]


def read_confusions(folder: Path) -> list[Confusion]:
    """The matrices of a run; a warning names each file that holds something else."""
    found = []
    for file in sorted(folder.glob("inference/confusion_*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            classes, matrix = [*map(str, content["classes"])], content["matrix"]
            if not classes or [len(row) for row in matrix] != [len(classes)] * len(classes):
                raise ValueError
            if not all(isinstance(number, int) and 0 <= number < 1 << 63 for row in matrix for number in row):
                raise ValueError
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            logger.warning("%s is left out: it holds no matrix of counts with a name for each class", file)
        else:
            found.append(Confusion(file.stem.removeprefix("confusion_"), classes, matrix))
    return found


def draw_confusion(confusion: Confusion) -> str:
    """The HTML of the matrix; a darker cell has a larger part of its true class."""
    if len(confusion.classes) > _MOST_CLASSES:
        return f"<p>{len(confusion.classes)} classes are too many to show.</p>\n"
    names = [*map(escape, confusion.classes)]
    head = "".join(f'<th class="up"><span>{name}</span></th>' for name in names)
    rows = []
    for i, row in enumerate(confusion.matrix):
        cells = []
        for j, number in enumerate(row):
            css = ("right" if i == j else "wrong") if number else ""
            text = str(number) if number and len(names) <= _MOST_NUMBERS else ""
            share = f"--part: {100 * number / sum(row):.0f}%" if number else ""
            cells.append(
                f'<td class="{css}" style="{share}" title="{names[i]}, predicted {names[j]}: {number}">{text}</td>'
            )
        rows.append(f"<tr><th>{names[i]}</th>{''.join(cells)}</tr>\n")
    head = f"<thead><tr><th></th>{head}</tr></thead>\n"
    return f'<table class="confusion">\n{head}<tbody>\n{"".join(rows)}</tbody>\n</table>\n'
