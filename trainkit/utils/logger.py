"""Set up the log of a process."""

import importlib
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from trainkit.utils.plugins import lending

_GREEN = "\x1b[32m"
_YELLOW = "\x1b[33m"
_RED = "\x1b[31m"
_RESET = "\x1b[0m"

LINE_WIDTH = 120
"""Columns of the console, after which lines are broken."""


def setup_logger(
    output: str | os.PathLike[str] | None = None,
    distributed_rank: int = 0,
    *,
    color: bool = True,
    name: str = "trainkit",
    abbrev_name: str | None = None,
    enable_propagation: bool = False,
    configure_stdout: bool = True,
    stdout_level: int | str = logging.INFO,
) -> logging.Logger:
    """Write a logger's lines to stdout (on rank 0) and to a file (on every rank).

    The file has the lines from DEBUG on, stdout those from ``stdout_level`` on. On stdout a message
    of one line is broken after 120 columns. A second call with the same ``name`` replaces the
    first; ``close_logger`` undoes it.

    Args:
        output: a file (``.txt`` or ``.log``) or a folder for ``log.txt``, for appending; other
            ranks add ``.rankN``.
        color: use colours if stdout is a terminal.
        abbrev_name: replaces ``name`` in the lines. Without it, stdout shows no names of loggers.
        enable_propagation: whether handlers of parent loggers, such as pytest's, get the records
            too.
    """
    handlers: list[logging.Handler] = []
    if output is not None:
        path = _log_path(output, distributed_rank)
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        to_file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
        to_file.setFormatter(_Formatter(name, abbrev_name or name))
        handlers.append(to_file)
    if configure_stdout and distributed_rank == 0 and sys.stdout is not None:
        to_stdout = _StdoutHandler(stdout_level)
        to_stdout.setFormatter(_ConsoleFormatter(name, abbrev_name or "", color))
        handlers.append(to_stdout)
    close_logger(name)
    logger = logging.getLogger(name)
    if logger.level == logging.NOTSET:  # else the program has set it
        logger.setLevel(logging.DEBUG)
    logger.propagate = enable_propagation
    for handler in handlers:
        logger.addHandler(handler)
    return logger


def _log_path(output: str | os.PathLike[str], rank: int) -> str:
    path = os.fspath(output)
    if not path.endswith((".txt", ".log")):
        path = os.path.join(path, "log.txt")
    if rank == 0:
        return path
    return f"{path}.rank{rank}"


def log_file(name: str = "trainkit") -> str:
    """Path of the file that ``setup_logger`` has opened for a logger; "" if there is none."""
    for handler in logging.getLogger(name).handlers:
        if isinstance(handler, logging.FileHandler) and isinstance(handler.formatter, _Formatter):
            return handler.baseFilename
    return ""


def close_logger(name: str = "trainkit") -> None:
    """Undo ``setup_logger`` for a logger, and close its file."""
    logger = logging.getLogger(name)
    for handler in list(logger.handlers):
        if isinstance(handler.formatter, _Formatter):
            logger.removeHandler(handler)
            handler.close()
    if logger.level == logging.DEBUG:  # else the program has set it
        logger.setLevel(logging.NOTSET)
    logger.propagate = True


def printable(text: str) -> str:
    """The text with escapes in place of control characters, but for tabs and line ends.

    A name in a file of somebody else may have characters that move the cursor of a terminal or run
    its commands.
    """
    if text.isprintable():  # the usual case of a line
        return text
    chars = []
    for char in text:
        if char.isprintable() or char in "\t\n":
            chars.append(char)
        else:
            escape = repr(char).strip("'")
            chars.append(escape)
    return "".join(chars)


class _StdoutHandler(logging.StreamHandler):
    """Writes to the present ``sys.stdout``, even if it was redirected."""

    def __init__(self, level: int | str) -> None:
        logging.Handler.__init__(self, level)

    @property
    def stream(self) -> Any:
        return sys.stdout


def break_line(line: str, width: int = LINE_WIDTH) -> str:
    """Break a line that is longer than ``width``; the further lines are indented.

    It is broken between fields, which are two spaces apart, and a long field between words. A
    longer word stays whole.
    """
    broken = []
    for fields in _break_at("  ", line, width):
        broken += _break_at(" ", fields, width)
    return "\n".join(broken)


def _break_at(separator: str, line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    first, *rest = line.split(separator)
    lines = [first]
    for part in rest:
        longer = lines[-1] + separator + part
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append("    " + part)
    return lines


class _Formatter(logging.Formatter):
    """``[time logger] LEVEL: message``; the level only from WARNING on.

    Args:
        name: of the logger that is set up.
        shown_name: replaces it; "": no name is shown.
    """

    def __init__(self, name: str, shown_name: str) -> None:
        super().__init__("%(message)s", datefmt="%m/%d %H:%M:%S")
        self._name = name
        self._shown_name = shown_name

    def formatMessage(self, record: logging.LogRecord) -> str:
        return f"{self._head(record)}{self._level(record)}: {printable(record.message)}"

    def _head(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record, self.datefmt)} {self._name_to_show(record.name)}"
        return f"[{head.strip()}]"

    def _name_to_show(self, name: str) -> str:
        is_below = name == self._name or name.startswith(f"{self._name}.")
        if not self._name or not is_below:
            return name
        if not self._shown_name:
            return ""
        return self._shown_name + name.removeprefix(self._name)

    def _level(self, record: logging.LogRecord) -> str:
        return f" {record.levelname}" if record.levelno >= logging.WARNING else ""

    def formatException(self, ei: Any) -> str:
        return printable(super().formatException(ei))


class _ConsoleFormatter(_Formatter):
    """Breaks long lines, and has colours in a terminal."""

    def __init__(self, name: str, shown_name: str, color: bool) -> None:
        super().__init__(name, shown_name)
        self._color = color

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        if "\n" not in text:
            text = break_line(text)
        if not self._color or not sys.stdout.isatty():
            return text
        head = self._head(record)
        level = self._level(record)
        message = text.removeprefix(head + level)
        if record.levelno >= logging.ERROR:
            level = f"{_RED}{level}{_RESET}"
        elif level:
            level = f"{_YELLOW}{level}{_RESET}"
        return f"{_GREEN}{head}{_RESET}{level}{message}"


def format_table(
    rows: Iterable[Sequence[Any]],
    headers: Sequence[str] = (),
    *,
    max_rows: int | None = None,
    **options: Any,
) -> str:
    """``tabulate.tabulate(rows, headers, **options)`` of the first rows.

    tabulate is imported when this is called.
    """
    rows = list(rows)
    tabulate = importlib.import_module("tabulate").tabulate
    text: str = tabulate(rows[:max_rows], headers, **options)
    if max_rows is not None and len(rows) > max_rows:
        text += f"\n... and {len(rows) - max_rows} more"
    return text


__getattr__, __dir__ = lending(__name__)
