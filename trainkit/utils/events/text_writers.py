"""Writers of scalars into text files."""

import csv
import io
import math
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

from trainkit.utils.events.storage import EventStorage
from trainkit.utils.events.writers import Scalar, ScalarWriter, rows_by_iteration
from trainkit.utils.run_file import RunFile


class _LinesWriter(ScalarWriter):
    """Base class of writers that append lines to a file, without fsync: that would take longer than a step."""

    def __init__(self, file: RunFile, window_size: int) -> None:
        super().__init__(window_size)
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """The state after all lines are written to the disk."""
        return {"length": self._file.sync(), **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._file.go_on_at(state["length"])


class JSONWriter(_LinesWriter):
    """One line of JSON per iteration with new scalars, smoothed; a value that is not finite is ``null``.

    Scalars that were put with an epoch get separate lines, with ``epoch`` and ``iteration``.

    Read the file by ``[json.loads(line) for line in open(path)]`` or ``pandas.read_json(path, lines=True)``. It is
    opened at the first write. In a resumed run, that write first moves the lines after the checkpoint into
    ``<json_file>.cut_1`` (or ``_2``, ...). While writing fails, the rows of the last 200 writes are kept.
    """

    def __init__(self, json_file: str | Path, window_size: int = 20) -> None:
        super().__init__(RunFile(json_file), window_size)

    def _show(self, scalars: list[Scalar], storage: EventStorage) -> None:
        lines = []
        for iter, epoch, row in rows_by_iteration(scalars):
            line = {"iteration": iter, **row} if epoch is None else {"iteration": iter, "epoch": epoch, **row}
            # json.dumps takes three times as long
            items = [
                f"{encode_basestring_ascii(name)}: {value if math.isfinite(value) else 'null'}"
                for name, value in sorted(line.items())
            ]
            lines.append("{" + ", ".join(items) + "}\n")
        self._file.append("".join(lines))


class CSVWriter(_LinesWriter):
    """One line ``iteration,epoch,name,value`` per new scalar, smoothed; the first line has these names.

    ``epoch`` is empty for a scalar without one. A value that is not finite is ``nan``, ``inf`` or ``-inf``. A name that
    a spreadsheet would read as a formula gets an apostrophe before it. The file grows and is cut like that of
    `JSONWriter`. For a column per scalar, use pandas: ``pandas.read_csv(path).pivot_table(index="iteration",
    columns="name", values="value")``.
    """

    def __init__(self, csv_file: str | Path, window_size: int = 20) -> None:
        super().__init__(RunFile(csv_file, header="iteration,epoch,name,value\n"), window_size)

    def _show(self, scalars: list[Scalar], storage: EventStorage) -> None:
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows(
            (iter, epoch, _text_cell(name), repr(value))
            for iter, epoch, row in rows_by_iteration(scalars)
            for name, value in row.items()
        )
        self._file.append(lines.getvalue())


def _text_cell(name: str) -> str:
    """The name as text: not a formula for a spreadsheet, and without carriage returns, which ``csv`` does not quote."""
    name = name.replace("\r", " ")
    return f"'{name}" if name[:1].isspace() or name.startswith(("=", "+", "-", "@")) else name
