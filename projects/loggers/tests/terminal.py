"""A terminal for the tests: what is written to it, as it stands there in the end."""

import io
import re
import sys
from contextlib import contextmanager
from unittest import mock

MOVES = re.compile("\r|\n|\x1b\\[A|[^\r\n\x1b]+")


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def lines(self):
        """What one sees: a carriage return goes back to the start of its line, ``ESC [A`` one line up."""
        lines, row, column = [""], 0, 0
        for part in MOVES.findall(self.getvalue()):
            if part == "\r":
                column = 0
            elif part == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif part == "\x1b[A":
                row -= 1
            else:
                line = lines[row].ljust(column)
                lines[row] = line[:column] + part + line[column + len(part) :]
                column += len(part)
        return [line.rstrip() for line in lines]


@contextmanager
def as_stdout(stdout, term="xterm"):
    with mock.patch.object(sys, "stdout", stdout), mock.patch.dict("os.environ", {"TERM": term}):
        yield stdout
