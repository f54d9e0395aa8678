"""Writers of scalars into text files."""

import csv
import io
import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainkit.utils.events.storage import get_event_storage
from trainkit.utils.events.writers import EventWriter, Scalar, Unwritten, rows_by_iteration
from trainkit.utils.run_file import RunFile


class _LinesWriter(EventWriter):
    """Appends lines for new scalars; a subclass formats them."""

    def __init__(self, file: RunFile, window_size: int) -> None:
        self._file = file
        self._news = Unwritten(window_size)

    def write(self) -> None:
        # no fsync: it would take longer than a step
        self._file.append("".join(map(self._lines, self._news.take(get_event_storage()))))
        self._news.confirm()

    def close(self) -> None:
        self._news.forget()
        self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """The state after all lines are written to the disk."""
        return {"length": self._file.sync(), **self._news.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._file.go_on_at(state["length"])
        self._news.load_state_dict(state)

    def _lines(self, scalars: list[Scalar]) -> str:
        raise NotImplementedError


class JSONWriter(_LinesWriter):
    """One line of JSON per iteration with new scalars, smoothed; a value that is not finite is ``null``.

    Scalars that were put with an epoch get separate lines, with ``epoch`` and ``iteration``.

    Read the file by ``[json.loads(line) for line in open(path)]`` or ``pandas.read_json(path, lines=True)``. It is
    opened at the first write. In a resumed run, that write first moves the lines after the checkpoint into
    ``<json_file>.cut_1`` (or ``_2``, ...). While writing fails, the rows of the last 200 writes are kept.
    """

    def __init__(self, json_file: str | Path, window_size: int = 20) -> None:
        super().__init__(RunFile(json_file), window_size)

    def _lines(self, scalars: list[Scalar]) -> str:
        lines = []
        for iter, epoch, row in rows_by_iteration(scalars):
            line = {"iteration": iter, **row} if epoch is None else {"iteration": iter, "epoch": epoch, **row}
            # json.dumps takes three times as long
            items = [
                f"{_quoted(name)}: {value!r}" if math.isfinite(value) else f"{_quoted(name)}: null"
                for name, value in sorted(line.items())
            ]
            lines.append("{" + ", ".join(items) + "}\n")
        return "".join(lines)


@lru_cache(1000)
def _quoted(name: str) -> str:
    return json.dumps(name)


class CSVWriter(_LinesWriter):
    """One line ``iteration,epoch,name,value`` per new scalar, smoothed, below a line with these names.

    ``epoch`` is empty for a scalar without one. A value that is not finite is ``nan``, ``inf`` or ``-inf``. A name that
    a spreadsheet would read as a formula gets an apostrophe in front. The file grows and is cut like that of
    `JSONWriter`. For a column per scalar, use pandas: ``pandas.read_csv(path).pivot_table(index="iteration",
    columns="name", values="value")``.
    """

    def __init__(self, csv_file: str | Path, window_size: int = 20) -> None:
        super().__init__(RunFile(csv_file, header="iteration,epoch,name,value\n"), window_size)

    def _lines(self, scalars: list[Scalar]) -> str:
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows(
            (iter, epoch, _text_cell(name), repr(value))
            for iter, epoch, row in rows_by_iteration(scalars)
            for name, value in row.items()
        )
        return lines.getvalue()


def _text_cell(name: str) -> str:
    """The name as text: not a formula for a spreadsheet, and without carriage returns, which ``csv`` does not quote."""
    name = name.replace("\r", " ")
    return f"'{name}" if name[:1].isspace() or name.startswith(("=", "+", "-", "@")) else name
