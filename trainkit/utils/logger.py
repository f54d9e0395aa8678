"""Set up the log of a process."""

import importlib
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from trainkit.utils.plugins import lending

_GREEN, _YELLOW, _RED, _RESET = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


def setup_logger(
    output: str | os.PathLike[str] | None = None,
    distributed_rank: int = 0,
    *,
    color: bool = True,
    name: str = "trainkit",
    abbrev_name: str | None = None,
    enable_propagation: bool = False,
    configure_stdout: bool = True,
    stdout_level: int | str = logging.DEBUG,
) -> logging.Logger:
    """Write a logger's lines, from DEBUG on, to stdout (rank 0, from ``stdout_level`` on) and to a file (every rank).

    A second call with the same ``name`` replaces the first; ``close_logger`` undoes it.

    Args:
        output: a file (``.txt`` or ``.log``) or a folder for ``log.txt``, for appending; other ranks add ``.rankN``.
        color: use colours if stdout is a terminal.
        abbrev_name: replaces ``name`` in the lines. Without it, stdout shows only the last word of a logger's name.
        enable_propagation: whether handlers of parent loggers, such as pytest's, get the records too.
    """
    handlers: list[logging.Handler] = []
    if output is not None:
        path = (
            os.fspath(output)
            if os.fspath(output).endswith((".txt", ".log"))
            else os.path.join(output, "log.txt")
        )
        path += f".rank{distributed_rank}" if distributed_rank else ""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        handlers.append(logging.FileHandler(path, encoding="utf-8", errors="backslashreplace"))
        handlers[0].setFormatter(_Formatter(name, abbrev_name or name))
    if configure_stdout and distributed_rank == 0 and sys.stdout is not None:
        handlers.append(_StdoutHandler(stdout_level))
        handlers[-1].setFormatter(_Formatter(name, abbrev_name, color))
    close_logger(name)
    logger = logging.getLogger(name)
    logger.setLevel(logging.DEBUG)
    logger.propagate = enable_propagation
    for handler in handlers:
        logger.addHandler(handler)
    return logger


def log_file(name: str = "trainkit") -> str:
    """Path of the file that ``setup_logger`` has opened for a logger; "" if there is none."""
    for handler in logging.getLogger(name).handlers:
        if isinstance(handler, logging.FileHandler) and isinstance(handler.formatter, _Formatter):
            return handler.baseFilename
    return ""


def close_logger(name: str = "trainkit") -> None:
    """Undo ``setup_logger`` for a logger, and close its file."""
    logger = logging.getLogger(name)
    for handler in [
        handler for handler in logger.handlers if isinstance(handler.formatter, _Formatter)
    ]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def printable(text: str) -> str:
    """The text with escapes in place of control characters, but for tabs and line ends.

    A name in a file of somebody else may have characters that move the cursor of a terminal or run its commands.
    """
    return "".join(
        char if char.isprintable() or char in "\t\n" else repr(char)[1:-1] for char in text
    )


class _StdoutHandler(logging.StreamHandler):
    """Writes to the present ``sys.stdout``, even if it was redirected."""

    def __init__(self, level: int | str) -> None:
        logging.Handler.__init__(self, level)

    @property
    def stream(self) -> Any:
        return sys.stdout


class _Formatter(logging.Formatter):
    """``[time logger] LEVEL: message``; the level only from WARNING on."""

    def __init__(self, name: str, short: str | None, color: bool = False) -> None:
        super().__init__("%(message)s", datefmt="%m/%d %H:%M:%S")
        self._name, self._short, self._color = name, short, color

    def formatMessage(self, record: logging.LogRecord) -> str:
        name = record.name
        if self._name and f"{name}.".startswith(f"{self._name}."):
            name = (
                name.rpartition(".")[2]
                if self._short is None
                else self._short + name[len(self._name) :]
            )
        head = f"[{self.formatTime(record, self.datefmt)} {name}]"
        level = f" {record.levelname}" if record.levelno >= logging.WARNING else ""
        if self._color and sys.stdout.isatty():
            head = f"{_GREEN}{head}{_RESET}"
            level = (
                level and f"{_RED if record.levelno >= logging.ERROR else _YELLOW}{level}{_RESET}"
            )
        return f"{head}{level}: {printable(record.message)}"

    def formatException(self, ei: Any) -> str:
        return printable(super().formatException(ei))


def format_table(
    rows: Iterable[Sequence[Any]],
    headers: Sequence[str] = (),
    *,
    max_rows: int | None = None,
    **options: Any,
) -> str:
    """``tabulate.tabulate(rows, headers, **options)`` of the first rows; imports tabulate when called."""
    rows = list(rows)
    text: str = importlib.import_module("tabulate").tabulate(rows[:max_rows], headers, **options)
    return (
        text
        if max_rows is None or len(rows) <= max_rows
        else f"{text}\n... and {len(rows) - max_rows} more"
    )


__getattr__, __dir__ = lending(__name__)
