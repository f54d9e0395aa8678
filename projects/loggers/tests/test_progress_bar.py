import io
import logging
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.engine.job import tiny_cfg
from trainkit.config import prepare_projects
from trainkit.utils.events import EventStorage, ProgressBar
from trainkit.utils.logger import close_logger, setup_logger


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stand_in(monkeypatch):
    """A function that puts something in the place of stdout."""

    def stand_in(stdout, term="xterm"):
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setenv("TERM", term)
        return stdout

    return stand_in


def show(writer, iters, max_iter=10, start_iter=0, **scalars):
    with EventStorage() as storage:
        writer.begin(SimpleNamespace(max_iter=max_iter, start_iter=start_iter))
        for storage.iter in iters:
            storage.put_scalars(**scalars)
        writer.write()
        writer.close()


def test_each_run_has_a_bar_of_its_own_with_loss_and_rate_from_where_it_starts(stand_in):
    terminal, writer = stand_in(Terminal()), ProgressBar(0)
    for _ in range(2):
        show(writer, range(4), total_loss=0.25, lr=0.1, accuracy=1.0)
        assert sys.stdout is terminal
    first, second, _ = terminal.getvalue().split("\n")
    for line in (first, second):
        last = line.rpartition("\r")[2]
        assert last.startswith("Training:  40%")
        assert "4/10" in last
        assert last.rstrip().endswith("loss=0.25, lr=0.1]")
    terminal = stand_in(Terminal())
    show(writer, range(6, 8), max_iter=40, start_iter=6, loss=1.0)
    assert terminal.getvalue().rpartition("\r")[2].startswith("Training:  20%")


def test_log_lines_stand_above_the_bar_and_the_line_of_the_console_is_in_the_file(
    tmp_path, stand_in
):
    terminal = stand_in(Terminal())
    with EventStorage() as storage:
        setup_logger(tmp_path, color=False, stdout_level="INFO")
        writer = ProgressBar(max_iter=10, iters_per_epoch=3)
        threads = threading.enumerate()
        writer.begin(SimpleNamespace(max_iter=10, start_iter=0))
        storage.put_scalar("total_loss", 0.25)
        writer.write()
        logging.getLogger("trainkit").info("a line of its own")
        print("printed")
        writer.close()
        close_logger()
    assert threading.enumerate() == threads
    line = ": epoch 1/4  after 1/10  total_loss: 0.25"
    assert (tmp_path / "log.txt").read_text().splitlines()[0].endswith(line)
    *_, own, printed, bar, _ = terminal.getvalue().split("\n")
    assert own.endswith("a line of its own")  # after the bar was cleared
    assert printed.rpartition("\r")[2] == "printed"
    assert bar.rpartition("\r")[2].startswith("Training:  10%|")


def test_a_notebook_shows_a_bar(stand_in):
    notebook = stand_in(type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})())
    show(ProgressBar(), [])
    assert sys.stdout is notebook
    assert "Training" in notebook.getvalue()


@pytest.mark.parametrize(
    ("stdout", "term", "name"),
    [
        (Terminal(), "xterm", "progress_bar"),
        (Terminal(), "dumb", "console"),
        (io.StringIO(), "xterm", "console"),
    ],
)
def test_the_key_puts_the_bar_in_the_place_of_the_console_in_a_terminal(
    tmp_path, stand_in, stdout, term, name
):
    stand_in(stdout, term)
    cfg = prepare_projects(
        tiny_cfg(tmp_path, "LOG.PROGRESS", True, "LOG.WRITERS", ["console", "json"])
    )
    assert {**cfg.LOG}["WRITERS"] == [name, "json"]
