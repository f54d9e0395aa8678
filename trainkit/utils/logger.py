"""Set up the log of a process, and limit repeated log lines."""

import logging
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch

from trainkit.utils.progress import above_bars, let_stdout_go
from trainkit.utils.run_file import RunFile
from trainkit.utils.tables import format_table

_MAX_PENDING = 1000  # lines that wait while the disk is full; then the oldest ones are lost
_GREEN, _YELLOW, _RED, _RESET = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


NOT_ON_TERMINAL = {"not_on_terminal": True}  # the ``extra`` of a line for the log files only

# logger -> handlers that `setup_logger` has added, and the earlier level and propagation
_setups: dict[str, tuple[list[logging.Handler], int, bool]] = {}
_counts: Counter[Hashable] = Counter()
_last_times: dict[Hashable, float] = {}


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
        output: a file, if it ends in ``.txt`` or ``.log``, else a folder for ``log.txt``; other ranks add ``.rankN``.
            Lines are appended to the file. If it is deleted, it is written again. While the disk is full, lines wait,
            and one message goes to stderr. None: no file.
        color: use colours if stdout is a terminal.
        name: root of the logger names; ``""`` is the root logger.
        abbrev_name: replaces ``name`` in the lines.
        enable_propagation: whether handlers of parent loggers, such as pytest's, get the records too.

    Raises:
        OSError: the file or its folder cannot be written; the logger is unchanged.
    """
    handlers: list[logging.Handler] = []
    if output is not None:
        handlers.append(_open_log_file(os.fspath(output), distributed_rank))
    if configure_stdout and distributed_rank == 0:
        handlers.append(_StdoutHandler(stdout_level))
    short = name if abbrev_name is None else abbrev_name
    for handler in handlers:
        handler.setFormatter(_Formatter(name, short, color and isinstance(handler, _StdoutHandler)))

    close_logger(name)
    logger = logging.getLogger(name)
    _setups[name] = handlers, logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = enable_propagation
    for handler in handlers:
        logger.addHandler(handler)
    return logger


def close_logger(name: str = "trainkit") -> None:
    """Undo ``setup_logger`` for a logger, and close its file; does nothing if it was not set up."""
    if name not in _setups:
        return
    logger = logging.getLogger(name)
    handlers, level, logger.propagate = _setups.pop(name)
    logger.setLevel(level)
    for handler in handlers:
        logger.removeHandler(handler)
        handler.close()


def log_first_n(
    lvl: int,
    msg: str,
    n: int = 1,
    *,
    name: str | None = None,
    key: Literal["caller", "message"] | Collection[Literal["caller", "message"]] = "caller",
) -> None:
    """Log only the first ``n`` times.

    Args:
        name: the name of the logger; default is the calling module.
        key: calls are counted together if they have the same calling line ("caller"), the same message, or both.
    """
    parts = (key,) if isinstance(key, str) else tuple(key)
    if not parts or not set(parts) <= {"caller", "message"}:
        raise ValueError(f"key must be 'caller', 'message' or both in a tuple, got {key!r}")
    module, line = _caller()
    if _count("first", *(line if part == "caller" else msg for part in sorted(parts))) <= n:
        logging.getLogger(name or module).log(lvl, msg, stacklevel=2)


def log_every_n(lvl: int, msg: str, n: int = 1, *, name: str | None = None) -> None:
    """Log the first of every ``n`` calls from the same line. Raises ValueError if ``n`` is less than 1."""
    if n < 1:
        raise ValueError(f"n must be >= 1 call, got {n}")
    module, line = _caller()
    if (_count("every", line) - 1) % n == 0:
        logging.getLogger(name or module).log(lvl, msg, stacklevel=2)


def log_every_n_seconds(lvl: int, msg: str, n: float = 1, *, name: str | None = None) -> None:
    """Log unless the same line has logged less than ``n`` seconds ago."""
    module, line = _caller()
    now = time.monotonic()
    if now - _last_times.get(line, -math.inf) >= n:
        _last_times[line] = now
        logging.getLogger(name or module).log(lvl, msg, stacklevel=2)


def _log_api_usage(identifier: str) -> None:
    """Count a use of ``trainkit.<identifier>`` with torch's usage logging."""
    torch._C._log_api_usage_once(f"trainkit.{identifier}")


def create_small_table(small_dict: Mapping[str, Any]) -> str:
    """A table of one row with the keys as header, for a few values."""
    center: dict[str, Any] = {"stralign": "center", "numalign": "center"}
    return format_table([list(small_dict.values())], list(small_dict), tablefmt="pipe", floatfmt=".3f", **center)


class _StdoutHandler(logging.Handler):
    """Writes to the current ``sys.stdout``, even if it was redirected."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stdout is None or hasattr(record, "not_on_terminal"):
            return
        try:
            with above_bars():
                sys.stdout.write(f"{self.format(record)}\n")
                sys.stdout.flush()
        except OSError as error:
            let_stdout_go(error)
        except Exception:
            self.handleError(record)


class _FileHandler(logging.Handler):
    """Appends to a file; while that fails, lines wait."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = RunFile(path)
        self._file.append("")
        self._waiting: deque[str] = deque(maxlen=_MAX_PENDING)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.append(f"{self.format(record)}\n")
            lines = [self._waiting.popleft() for _ in range(len(self._waiting))]  # writing the file may log, too
            try:
                self._file.append("".join(lines))
            except OSError as error:
                if len(lines) == 1 and not self._waiting:  # otherwise this was logged before
                    print(f"the log cannot be written, the run continues: {error}", file=sys.stderr)
                self._waiting.extendleft(reversed(lines))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            self._file.append("".join(self._waiting))
        self._file.close()
        super().close()


class _Formatter(logging.Formatter):
    """``[time logger] LEVEL: message``; the level only from WARNING on."""

    def __init__(self, name: str, abbrev_name: str, color: bool) -> None:
        super().__init__("%(asctime)s%(message)s", datefmt="%m/%d %H:%M:%S")
        self._name, self._abbrev_name, self._color = name, abbrev_name, color
        self._second = (-1, "")  # (second, its text): formatting the time is the slowest part of a short line

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        if self._second[0] != int(record.created):
            self._second = int(record.created), super().formatTime(record, datefmt)
        return self._second[1]

    def formatMessage(self, record: logging.LogRecord) -> str:
        name = record.name
        if self._name and (name == self._name or name.startswith(f"{self._name}.")):
            name = self._abbrev_name + name[len(self._name) :]
        head = f"[{record.asctime} {name}]"
        level = f" {record.levelname}" if record.levelno >= logging.WARNING else ""
        if self._color and sys.stdout.isatty():
            head = f"{_GREEN}{head}{_RESET}"
            level = level and f"{_RED if record.levelno >= logging.ERROR else _YELLOW}{level}{_RESET}"
        # a lone surrogate cannot be written
        return f"{head}{level}: {record.message}".encode("utf-8", "backslashreplace").decode()


def _open_log_file(output: str, rank: int) -> _FileHandler:
    path = output if output.endswith((".txt", ".log")) else os.path.join(output, "log.txt")
    if rank > 0:
        path = f"{path}.rank{rank}"
    try:
        return _FileHandler(path)
    except OSError as error:
        folder, name = os.path.split(os.path.abspath(path))
        text = f"cannot write {name} in the folder {folder!r}: {error.strerror}; choose another"
        raise OSError(error.errno, text) from error


def _count(*key: Hashable) -> int:
    _counts[key] += 1
    return _counts[key]


def _caller() -> tuple[str, tuple[str, int]]:
    """(module name, (file, line)) of the code that has called this module."""
    frame = sys._getframe(2)
    return frame.f_globals.get("__name__", "__main__"), (frame.f_code.co_filename, frame.f_lineno)


@contextmanager
def logging_from(level: int) -> Iterator[None]:
    """Context in which all loggers of the process drop records below ``level``."""
    before = logging.root.manager.disable
    logging.disable(max(before, level - 1))
    try:
        yield
    finally:
        logging.disable(before)
