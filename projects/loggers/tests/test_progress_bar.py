import fcntl
import io
import logging
import os
import struct
import sys
import termios
import threading
from types import SimpleNamespace

import pytest
from trainkit.projects.loggers.tests.terminal import Terminal, as_stdout

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Regression, sgd
from trainkit.config import prepare_projects
from trainkit.engine import SimpleTrainer, default_writers
from trainkit.utils.events import EventStorage, ProgressBar
from trainkit.utils.logger import close_logger, setup_logger


def trainer_of(max_iter=10, start_iter=0, **attributes):
    loader = SimpleNamespace(batch_size=8)
    return SimpleNamespace(max_iter=max_iter, start_iter=start_iter, data_loader=loader, **attributes)


def bar_after(iters, trainer, stdout=None, **scalars):
    """The last line of a terminal when these iterations have put these scalars: before and after the bar."""
    with as_stdout(stdout or Terminal()) as terminal, EventStorage() as storage:
        writer = ProgressBar(0)
        writer.begin(trainer)
        for storage.iter in iters:
            storage.put_scalars(**scalars)
        writer.write()
        writer.close()
        assert sys.stdout is terminal
    *_, line, end = terminal.lines()
    assert end == ""
    description, _, details = line.split("|")
    return description, details.strip()


def test_the_bar_shows_epoch_loss_rate_samples_per_second_and_eta():
    trainer = trainer_of(has_epochs=True, iters_per_epoch=3)
    shown = bar_after(range(4), trainer, total_loss=0.25, lr=0.1, time=2.0, eta_seconds=12.0)
    assert shown == ("[Epoch 2/4]  40%", "after 4 of 10, eta 0:00:12  loss 0.25  lr 0.1  4 samples/s")


def test_a_narrow_terminal_shows_a_bar_and_the_first_details_only(monkeypatch):
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 50, 75, 0, 0))
    monkeypatch.setattr(Terminal, "fileno", lambda self: follower)
    details = bar_after([0], trainer_of(), total_loss=0.25, lr=0.1, time=2.0, eta_seconds=18.0)[1]
    os.close(leader)
    os.close(follower)
    assert details == "after 1 of 10, eta 0:00:18  loss 0.25"


def test_unknown_values_are_left_out():
    assert bar_after(range(4), trainer_of(), accuracy=1.0) == ("Training  40%", "after 4 of 10")


def test_measured_samples_per_second_win():
    assert bar_after(range(4), trainer_of(), time=2.0, samples_per_sec=77.0)[1] == "after 4 of 10, 77 samples/s"


def test_micro_batches_count_together_and_a_loader_without_a_size_is_shown_without_samples():
    assert bar_after(range(4), trainer_of(accumulation_steps=3), time=2.0)[1] == "after 4 of 10, 12 samples/s"
    endless = SimpleTrainer(Regression(), [], sgd(Regression()))
    endless.max_iter = 10
    assert bar_after(range(4), endless, time=2.0)[1] == "after 4 of 10"


def test_a_resumed_run_starts_where_it_was_and_the_end_is_that_of_the_run():
    assert bar_after(range(6, 8), trainer_of(40, 6), loss=1.0) == ("Training  20%", "after 8 of 40")


def test_log_lines_stand_above_the_bar_and_the_line_of_the_console_is_in_the_file(tmp_path):
    with as_stdout(Terminal()) as terminal, EventStorage() as storage:
        setup_logger(tmp_path, color=False, stdout_level="INFO")
        writer = ProgressBar(max_iter=10, iters_per_epoch=3)
        threads = threading.enumerate()
        writer.begin(trainer_of())
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
    assert bar.startswith("[Epoch 1/4]  10%|")


@pytest.mark.parametrize("num_runs", [1, 2])
def test_each_run_has_a_bar_of_its_own(num_runs):
    with as_stdout(Terminal()) as terminal:
        writer = ProgressBar()
        for _ in range(num_runs):
            with EventStorage(1) as storage:
                writer.begin(trainer_of(2))
                storage.put_scalar("a", 1.0)
                writer.write()
                writer.close()
    assert [line.partition("|")[0] for line in terminal.lines()] == ["Training 100%"] * num_runs + [""]


def test_a_notebook_shows_a_widget_or_a_bar():
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    with as_stdout(notebook):
        writer = ProgressBar()
        writer.begin(trainer_of())
        assert sys.stdout is notebook
        writer.close()


@pytest.mark.parametrize(
    ("stdout", "term", "name"),
    [(Terminal(), "xterm", "progress_bar"), (Terminal(), "dumb", "console"), (io.StringIO(), "xterm", "console")],
)
def test_the_key_puts_the_bar_in_the_place_of_the_console_in_a_terminal(tmp_path, stdout, term, name):
    cfg = tiny_cfg(tmp_path, "LOG.PROGRESS", True, "LOG.WRITERS", ["console", "json"])
    with as_stdout(stdout, term):
        writers = prepare_projects(cfg).LOG.WRITERS
    assert writers == [name, "json"]


def test_the_bar_is_found_by_its_name(tmp_path):
    [writer] = default_writers(tmp_path, names=["progress_bar"])
    assert type(writer) is ProgressBar
