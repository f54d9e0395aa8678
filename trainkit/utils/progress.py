"""Progress bars at the bottom of a terminal, below the log lines."""

import errno
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

_stdout_is_lost = False
_shown_in: int | None = None  # id of the process that shows bars; a fork of it shows none
_num_open = 0
_FORMAT = "{desc} {percentage:3.0f}%|{bar}| after {n_fmt} of {total_fmt}{postfix}"


def show_bars(on: bool) -> None:
    """Switch bars off, or on if stdout is a terminal or a notebook."""
    global _shown_in
    _shown_in = os.getpid() if on and (_is_terminal() or is_notebook()) else None


def are_bars_shown() -> bool:
    return _shown_in == os.getpid()


def above_bars() -> AbstractContextManager[Any]:
    """Context for writing lines to stdout; open bars stay below these lines."""
    if _num_open and not are_bars_shown() and _is_terminal():
        sys.stdout.write("\r\x1b[K")  # in a fork, such as a loader worker: clear the bar; its owner draws it again
    return tqdm.external_write_mode(file=sys.stdout) if _num_open and are_bars_shown() else nullcontext()


def let_stdout_go(error: OSError) -> None:
    """Continue without stdout, which cannot be written; log this once. If nobody reads stdout, discard later output."""
    global _stdout_is_lost
    was_lost, _stdout_is_lost = _stdout_is_lost, True
    if error.errno in (errno.EPIPE, errno.EIO):
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if not was_lost:
        logger.warning("sys.stdout cannot be written, the run continues without it: %s", error)


@contextmanager
def _may_lose_stdout() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        let_stdout_go(error)


class Bar:
    """A line ``description 42%|####    | after 336 of 800, details``; nothing if bars are off.

    Several open bars are drawn in the order of opening. A notebook shows only the first, as a widget if the package
    ipywidgets is installed.

    Args:
        total: the total number of ``unit``; None: unknown.
        initial: the number done before.
        stays: whether the bar stays after `close`.
    """

    def __init__(self, total: int | None, description: str, *, initial: int = 0, stays: bool = True) -> None:
        global _num_open
        self._bar: tqdm[Any] | None = None
        if are_bars_shown() and not (_num_open and is_notebook()):
            with _may_lose_stdout():
                self._bar = _tqdm_class()(
                    desc=description,
                    total=total,
                    initial=initial,
                    leave=stays,
                    file=sys.stdout,
                    dynamic_ncols=True,
                    bar_format=_FORMAT if total else None,
                )
                _num_open += 1

    def go_to(self, done: int) -> None:
        """Set the progress; takes less than a microsecond, since bars are drawn at most ten times a second."""
        if self._bar is not None:
            try:
                self._bar.update(done - self._bar.n)
            except OSError as error:
                let_stdout_go(error)

    def describe(self, description: str, details: Sequence[str]) -> None:
        """Set the texts before and after the bar, as many as fit, for the next drawing; any thread may call it."""
        if self._bar is not None:
            self._bar.set_description_str(description, refresh=False)
            room = (self._bar.format_dict["ncols"] or 200) - len(description) - 40  # 40: for the bar and its counts
            fitting = [text for n, text in enumerate(details, 1) if len("  ".join(details[:n])) <= room]
            self._bar.set_postfix_str("  ".join(fitting), refresh=False)

    def close(self) -> None:
        global _num_open
        if self._bar is not None:
            bar, self._bar = self._bar, None
            _num_open -= 1
            with _may_lose_stdout():
                bar.close()


def _tqdm_class() -> type[tqdm]:
    has_widgets = is_notebook() and importlib.util.find_spec("ipywidgets") is not None
    base = importlib.import_module("tqdm.notebook").tqdm if has_widgets else tqdm
    # 0: no monitor thread, since processes may be forked while it runs
    return type("_Tqdm", (base,), {"monitor_interval": 0})


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def is_notebook() -> bool:
    return type(sys.stdout).__module__.partition(".")[0] == "ipykernel"
