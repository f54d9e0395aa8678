"""A sheet of rows that can be sorted. Its columns are split into tables that fit on the page."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape, unescape

_WIDTH = 1200  # width of a table in pixels
_LETTER, _GAP = 8.0, 20  # the width of a letter, the space between columns
_MOST_LETTERS = 30  # a longer text is broken into lines

NONE = "-"


@dataclass(frozen=True)
class Column:
    """
    Attributes:
        over: a text above the title; neighbours with the same text share it.
        title: HTML; its line may break at each ``<wbr>``.
        cells: HTML; `NONE` if there is no value.
        css: classes of the cells.
        starts_down: whether the first click sorts the largest value to the top.
    """

    over: str
    title: str
    cells: list[str]
    css: str = ""
    starts_down: bool = False

    @property
    def width(self) -> int:
        """The width in pixels that its texts need."""
        letters = max(
            max(map(_num_letters, self.title.split("<wbr>"))), *map(_num_letters, self.cells)
        )
        return round(_LETTER * min(letters, _MOST_LETTERS))


def _num_letters(html: str) -> float:
    """The width of a text; capitals are wider."""
    text = unescape(re.sub("<.*?>", "", html.replace("<i></i>", "    ")))
    return len(text) + 0.25 * sum(map(str.isupper, text))


def draw_sheet(
    title: str, heads: Iterable[str], classes: Sequence[str], groups: Sequence[Sequence[Column]]
) -> str:
    """The tables; columns without any value are left out.

    Args:
        title: the title of the first column.
        heads: the HTML at the start of each row.
        classes: the CSS class of each row.
        groups: columns that stay in one table.
    """
    filled = [
        [column for column in group if any(cell != NONE for cell in column.cells)]
        for group in groups
    ]
    first = Column("", title, [*heads])
    tables = [_draw_table(first, columns, classes) for columns in _pack(filled, _GAP + first.width)]
    return f'<div class="sheet">\n{"".join(tables)}</div>\n'


def _pack(groups: Sequence[Sequence[Column]], first_width: int) -> Iterator[list[Column]]:
    columns: list[Column] = []
    for group in groups:
        if (
            columns
            and first_width + sum(_GAP + column.width for column in [*columns, *group]) > _WIDTH
        ):
            yield columns
            columns = []
        columns += group
    yield columns


def _draw_table(first: Column, columns: Sequence[Column], classes: Sequence[str]) -> str:
    over = "".join(
        f'<th colspan="{len(same)}" class="{same[0].css}">{escape(text)}</th>'
        for text, same in (
            (text, [*group])
            for text, group in itertools.groupby(columns, lambda column: column.over)
        )
    )
    titles = "".join(
        f'<th class="{column.css} sub"{" data-down" * column.starts_down} style="min-width: {column.width + _GAP}px">'
        f"{column.title}</th>"
        for column in [first, *columns]
    )
    rows = "".join(
        f'<tr class="{css}"><th>{head}</th>'
        + "".join(f'<td class="{column.css}">{column.cells[i]}</td>' for column in columns)
        + "</tr>\n"
        for i, (head, css) in enumerate(zip(first.cells, classes, strict=True))
    )
    over = f"<tr><th></th>{over}</tr>\n" if any(column.over for column in columns) else ""
    head = f"<thead>{over}<tr>{titles}</tr></thead>\n"
    return f'<div class="wide"><table>\n{head}<tbody>\n{rows}</tbody>\n</table></div>\n'
