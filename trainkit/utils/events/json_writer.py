"""The writer of ``metrics.json``."""

import math
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

from trainkit.utils.events.storage import EventStorage
from trainkit.utils.events.writers import Scalar, ScalarWriter, rows_by_iteration
from trainkit.utils.run_file import RunFile


class LinesWriter(ScalarWriter):
    """Base class of writers that append lines to a file, which a resumed run cuts at its checkpoint."""

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


class JSONWriter(LinesWriter):
    """One line of JSON per iteration with new scalars, smoothed; a value that is not finite is ``null``.

    Scalars that were put with an epoch get separate lines, with ``epoch`` and ``iteration``. Read the file by
    ``pandas.read_json(path, lines=True)``. It is opened at the first write. In a resumed run, that write first moves
    the lines after the checkpoint into ``<json_file>.cut_1`` (or ``_2``, ...).
    """

    def __init__(self, json_file: str | Path, window_size: int = 20) -> None:
        super().__init__(RunFile(json_file), window_size)

    def _show(self, scalars: list[Scalar], storage: EventStorage) -> None:
        lines = ""
        for iter, epoch, row in rows_by_iteration(scalars):
            line = {"iteration": iter, **row} if epoch is None else {"iteration": iter, "epoch": epoch, **row}
            # json.dumps takes three times as long
            items = [
                f"{encode_basestring_ascii(name)}: {value if math.isfinite(value) else 'null'}"
                for name, value in sorted(line.items())
            ]
            lines += "{" + ", ".join(items) + "}\n"
        if lines:
            self._file.append(lines)
