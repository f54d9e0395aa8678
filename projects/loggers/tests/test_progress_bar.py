import io
import logging
import sys
import threading
from types import SimpleNamespace

import pytest
from trainkit.projects.loggers.tests.terminal import Terminal, as_stdout

from tests.engine.job import tiny_cfg
from trainkit.config import prepare_projects
from trainkit.utils.events import EventStorage, ProgressBar
from trainkit.utils.logger import close_logger, setup_logger


def bars_after(iters, *trainers, **scalars):
    """The lines of a terminal when these iterations have put these scalars, in a run of each trainer."""
    with as_stdout(Terminal()) as terminal:
        writer = ProgressBar(0)
        for max_iter, start_iter in trainers:
            with EventStorage() as storage:
                writer.begin(SimpleNamespace(max_iter=max_iter, start_iter=start_iter))
                for storage.iter in iters:
                    storage.put_scalars(**scalars)
                writer.write()
                writer.close()
        assert sys.stdout is terminal
    return terminal.lines()


def test_each_run_has_a_bar_of_its_own_with_loss_and_rate_from_where_it_starts():
    first, second, _ = bars_after(range(4), (10, 0), (10, 0), total_loss=0.25, lr=0.1, accuracy=1.0)
    assert first.startswith("Training:  40%")
    assert "4/10" in first
    assert first.endswith("loss=0.25, lr=0.1]")
    assert second.startswith("Training:  40%")
    [resumed, _] = bars_after(range(6, 8), (40, 6), loss=1.0)
    assert resumed.startswith("Training:  20%")


def test_log_lines_stand_above_the_bar_and_the_line_of_the_console_is_in_the_file(tmp_path):
    with as_stdout(Terminal()) as terminal, EventStorage() as storage:
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
    line = ": [Epoch 1/4]  after 1 of 10 iterations  total_loss: 0.25 "
    assert (tmp_path / "log.txt").read_text().splitlines()[0].endswith(line)
    first, second, bar, _ = terminal.lines()
    assert (first.split(": ")[1], second) == ("a line of its own", "printed")
    assert bar.startswith("Training:  10%|")


def test_a_notebook_shows_a_bar():
    with as_stdout(type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()) as notebook:
        writer = ProgressBar()
        writer.begin(SimpleNamespace(max_iter=10, start_iter=0))
        assert sys.stdout is notebook
        writer.close()
    assert "Training" in notebook.getvalue()


@pytest.mark.parametrize(
    ("stdout", "term", "name"),
    [(Terminal(), "xterm", "progress_bar"), (Terminal(), "dumb", "console"), (io.StringIO(), "xterm", "console")],
)
def test_the_key_puts_the_bar_in_the_place_of_the_console_in_a_terminal(tmp_path, stdout, term, name):
    with as_stdout(stdout, term):
        cfg = prepare_projects(tiny_cfg(tmp_path, "LOG.PROGRESS", True, "LOG.WRITERS", ["console", "json"]))
    assert {**cfg.LOG}["WRITERS"] == [name, "json"]
