"""Parts of a command line, and its checks."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from trainkit.projects.finders.script import SCRIPT_HELP

from trainkit.config import ConfigError
from trainkit.utils.logger import close_logger, setup_logger


def new_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that say what the job is."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config-file", default="", metavar="FILE", help="the job; without it, all defaults"
    )
    parser.add_argument("--script", default="", metavar="FILE", help=SCRIPT_HELP)
    return parser


def positive(text: str) -> int:
    """The type of an argument that is a number of things."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"need an integer >= 1, got {text!r}")
    return int(text)


def check_writable(path: str) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    is_new = not os.path.lexists(path)
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path!r} cannot be written: {error.strerror}; name another file"
        ) from error
    if is_new:
        os.remove(path)


@contextmanager
def only_logging(level: str) -> Iterator[None]:
    """Context in which trainkit shows no line below this level.

    The log is set up here: a trainer would set up one that shows more.
    """
    setup_logger(stdout_level=level)
    try:
        yield
    finally:
        close_logger()
