"""Set up the log of a process."""

import logging
import os
import sys

from trainkit.utils.plugins import lazy_names

_GREEN, _YELLOW, _RED, _RESET = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"

# logger -> handlers that `setup_logger` has added, and the earlier level and propagation
_setups: dict[str, tuple[list[logging.Handler], int, bool]] = {}


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

    A second call with the same ``name`` replaces the first; ``close_logger`` undoes it. If stdout or the file cannot be
    written later, stderr says so once, and the run continues.

    Args:
        output: a file, if it ends in ``.txt`` or ``.log``, else a folder for ``log.txt``; other ranks add ``.rankN``.
            Lines are appended. None: no file.
        color: use colours if stdout is a terminal.
        name: root of the logger names; ``""`` is the root logger.
        abbrev_name: replaces ``name`` in the lines. Without it, stdout shows only the last word of a logger's name.
        enable_propagation: whether handlers of parent loggers, such as pytest's, get the records too.
    """
    handlers: list[logging.Handler] = []
    if output is not None:
        path = os.fspath(output) if os.fspath(output).endswith((".txt", ".log")) else os.path.join(output, "log.txt")
        path += f".rank{distributed_rank}" if distributed_rank else ""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        handlers.append(_Handler(path))
        handlers[0].setFormatter(_Formatter(name, abbrev_name or name))
    if configure_stdout and distributed_rank == 0 and sys.stdout is not None:
        handlers.append(_Handler(level=stdout_level))
        handlers[-1].setFormatter(_Formatter(name, abbrev_name, color))
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
    if name in _setups:
        logger = logging.getLogger(name)
        handlers, level, logger.propagate = _setups.pop(name)
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


class _Handler(logging.Handler):
    """Writes to a file, or to the present ``sys.stdout``, even if it was redirected."""

    _has_failed = False

    def __init__(self, path: str = "", level: int | str = logging.DEBUG) -> None:
        super().__init__(level)
        self._file = open(path, "a", encoding="utf-8", errors="backslashreplace") if path else None  # noqa: SIM115

    def emit(self, record: logging.LogRecord) -> None:
        stream = self._file or sys.stdout
        try:
            stream.write(f"{self.format(record)}\n")
            stream.flush()
        except OSError as error:
            if not self._has_failed:
                print(
                    f"{getattr(stream, 'name', stream)} cannot be written, the run continues: {error}", file=sys.stderr
                )
            self._has_failed = True
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


class _Formatter(logging.Formatter):
    """``[time logger] LEVEL: message``; the level only from WARNING on."""

    def __init__(self, name: str, short: str | None, color: bool = False) -> None:
        super().__init__("%(message)s", datefmt="%m/%d %H:%M:%S")
        self._name, self._short, self._color = name, short, color

    def formatMessage(self, record: logging.LogRecord) -> str:
        name, known = record.name, f"{record.name}.".startswith(f"{self._name}.")
        if known and self._name:
            name = name.rpartition(".")[2] if self._short is None else self._short + name[len(self._name) :]
        head = f"[{self.formatTime(record, self.datefmt)} {name}]"
        level = f" {record.levelname}" if record.levelno >= logging.WARNING else ""
        if self._color and sys.stdout.isatty():
            head = f"{_GREEN}{head}{_RESET}"
            level = level and f"{_RED if record.levelno >= logging.ERROR else _YELLOW}{level}{_RESET}"
        return f"{head}{level}: {record.message}"


__getattr__ = lazy_names(
    __name__, "_log_api_usage", "create_small_table", "log_every_n", "log_every_n_seconds", "log_first_n"
)
