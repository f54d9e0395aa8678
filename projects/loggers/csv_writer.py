"""Scalars as rows of a table."""

import csv as csv_format
import io
import os
from pathlib import Path

from trainkit.utils.events.writers import WRITER_REGISTRY, LinesWriter, Row


class CSVWriter(LinesWriter):
    """One line ``iteration,epoch,name,value`` per new scalar, smoothed; the first line has these names.

    ``epoch`` is empty, except in earlier files. A value that is not finite is ``nan``, ``inf`` or ``-inf``. The file
    grows and is cut like that of `JSONWriter`. For a column per scalar, use pandas:
    ``pandas.read_csv(path).pivot_table(index="iteration", columns="name", values="value")``.
    """

    def __init__(self, csv_file: str | Path, window_size: int = 20) -> None:
        super().__init__(csv_file, window_size, header="iteration,epoch,name,value\n")

    def format(self, rows: list[Row]) -> str:
        lines = io.StringIO()
        writer = csv_format.writer(lines, lineterminator="\n")
        epoch = ""
        for iter, row in rows:
            for name, value in row.items():
                writer.writerow([iter, epoch, name, repr(value)])
        return lines.getvalue()


@WRITER_REGISTRY.register()
def csv(output_dir: str | os.PathLike[str], window_size: int) -> CSVWriter:
    return CSVWriter(Path(output_dir) / "metrics.csv", window_size)
