"""The confusion matrices in a run's ``confusion_<dataset>.json``, as tables."""

import json
import logging
from dataclasses import dataclass
from html import escape

from plots.runs import Run
from trainkit.utils.periods import say_done

logger = logging.getLogger(__name__)

_MOST_CLASSES = 30  # a larger table would not fit
_MOST_NUMBERS = 12  # in a larger table the numbers are only in the tooltips


@dataclass(frozen=True)
class Confusion:
    """
    Attributes:
        title: the dataset and the progress of the run.
        matrix: the number of samples, by true class and predicted class.
    """

    title: str
    classes: list[str]
    matrix: list[list[int]]


def read_confusions(run: Run) -> list[Confusion]:
    """The matrices of a run; a warning names each file that holds something else."""
    found = []
    for file in sorted(run.folder.glob("confusion_*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            classes, matrix = [*map(str, content["class_names"])], content["confusion"]
            iteration = content.get("iteration")
            is_square = [len(row) for row in matrix] == [len(classes)] * len(classes)
            if not is_square or not all(0 <= number < 1 << 63 for row in matrix for number in row):
                raise ValueError
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            logger.warning(
                "%s is left out: it holds no matrix of counts with a name for each class", file
            )
        else:
            when = f", {say_done(run.done_after(iteration))}" if isinstance(iteration, int) else ""
            found.append(Confusion(file.stem.removeprefix("confusion_") + when, classes, matrix))
    return found


def draw_confusion(confusion: Confusion) -> str:
    """The HTML of the matrix; a darker cell has a larger part of its true class."""
    names = [*map(escape, confusion.classes)]
    if len(names) > _MOST_CLASSES:
        return f"<p>{len(names)} classes are too many to show.</p>\n"
    head = "".join(f'<th class="up"><span>{name}</span></th>' for name in names)
    rows = []
    for i, row in enumerate(confusion.matrix):
        cells = []
        for j, number in enumerate(row):
            css = ("right" if i == j else "wrong") if number else ""
            text = f"{number:.6g}" if number and len(names) <= _MOST_NUMBERS else ""
            share = f"--part: {100 * number / sum(row):.0f}%" if number else ""
            cells.append(
                f'<td class="{css}" style="{share}" title="{names[i]}, predicted {names[j]}: {number:.6g}">{text}</td>'
            )
        rows.append(f"<tr><th>{names[i]}</th>{''.join(cells)}</tr>\n")
    head = f"<thead><tr><th></th>{head}</tr></thead>\n"
    return f'<table class="confusion">\n{head}<tbody>\n{"".join(rows)}</tbody>\n</table>\n'
