import fcntl
import logging
import os
import struct
import termios
from functools import partial
from types import SimpleNamespace

import pytest

from tests.engine.tiny import Regression, sgd
from tests.utils.terminal import Terminal, showing_bars
from trainkit.engine import SimpleTrainer
from trainkit.utils.events import EventStorage, ProgressBar
from trainkit.utils.logger import close_logger, setup_logger


def trainer_at(iter, **attributes):
    return SimpleNamespace(iter=iter, data_loader=SimpleNamespace(batch_size=8), **attributes)


def bar_after(writer, num_iters, trainer=trainer_at, **scalars):
    """The text in front of and behind the bar once ``num_iters`` iterations have put these scalars."""
    with showing_bars() as terminal, EventStorage() as storage:
        for storage.iter in range(num_iters):
            storage.put_scalars(**scalars)
            writer.advance(trainer(storage.iter))
        writer.write()
        writer.close()
    *_, line, end = terminal.lines()
    assert end == ""
    description, _, details = line.split("|")
    return description, details.strip()


def test_the_bar_shows_epoch_loss_rate_samples_per_second_and_eta():
    writer = ProgressBar(max_iter=10, iters_per_epoch=3)
    shown = bar_after(writer, 4, total_loss=0.25, lr=0.1, time=2.0, data_time=1.0)
    assert shown == ("[Epoch 2/4]  40%", "after 4 of 10, eta 0:00:12  loss 0.25  lr 0.1  4 samples/s")


def test_a_narrow_terminal_shows_a_bar_and_the_first_details_only(monkeypatch):
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 50, 80, 0, 0))
    monkeypatch.setattr(Terminal, "fileno", lambda self: follower)
    writer = ProgressBar(max_iter=10, iters_per_epoch=3)
    with showing_bars() as terminal, EventStorage() as storage:
        storage.put_scalars(total_loss=0.25, lr=0.1, time=2.0)
        writer.advance(trainer_at(0))
        writer.write()
        writer.close()
    os.close(leader)
    os.close(follower)
    line = terminal.lines()[-2]
    assert line.endswith("| after 1 of 10, eta 0:00:18  loss 0.25")
    assert len(line) < 80
    assert len(line.split("|")[1]) >= 5  # the bar


def test_what_is_not_known_is_left_out():
    assert bar_after(ProgressBar(max_iter=10), 4, accuracy=1.0) == ("Training  40%", "after 4 of 10")


def test_measured_samples_per_second_win():
    _, details = bar_after(ProgressBar(max_iter=10), 4, time=2.0, samples_per_sec=77.0)
    assert details == "after 4 of 10, eta 0:00:12  77 samples/s"


def test_micro_batches_count_together():
    _, details = bar_after(ProgressBar(max_iter=10), 4, partial(trainer_at, accumulation_steps=3), time=2.0)
    assert details == "after 4 of 10, eta 0:00:12  12 samples/s"


def test_a_resumed_run_starts_where_it_was():
    with showing_bars() as terminal, EventStorage(start_iter=6) as storage:
        writer = ProgressBar(max_iter=10)
        writer.advance(trainer_at(6))
        writer.advance(trainer_at(7))
        storage.put_scalar("time", 2.0)
        writer.write()
        writer.close()
    assert "| after 8 of 10, eta 0:00:06  4 samples/s" in terminal.lines()[-2]


def test_the_end_is_that_of_the_run():
    with showing_bars() as terminal, EventStorage():
        writer = ProgressBar(max_iter=10, iters_per_epoch=10)
        writer.begin(SimpleNamespace(max_iter=40))
        writer.advance(trainer_at(0))
        writer.close()
    assert terminal.lines()[-2].startswith("[Epoch 1/4]   2%|")


def test_the_log_line_is_in_the_file_but_not_above_the_bar(tmp_path):
    with showing_bars() as terminal, EventStorage() as storage:
        setup_logger(tmp_path, color=False)
        writer = ProgressBar(max_iter=10, iters_per_epoch=3)
        storage.put_scalar("total_loss", 0.25)
        writer.advance(trainer_at(0))
        writer.write()
        logging.getLogger("trainkit").info("a line of its own")
        writer.close()
        close_logger()
    assert (
        (tmp_path / "log.txt")
        .read_text()
        .splitlines()[0]
        .endswith(": [Epoch 1/4]  after 1 of 10 iterations  total_loss: 0.25 ")
    )
    above, bar, _ = terminal.lines()
    assert above.endswith("a line of its own")
    assert bar.startswith("[Epoch 1/4]  10%|")


@pytest.mark.parametrize("num_runs", [1, 2])
def test_each_run_has_a_bar_of_its_own(num_runs):
    with showing_bars() as terminal:
        writer = ProgressBar(max_iter=2)
        for _ in range(num_runs):
            with EventStorage():
                writer.advance(trainer_at(0))
                writer.advance(trainer_at(1))
                writer.close()
    assert [line.partition("|")[0] for line in terminal.lines()] == ["Training 100%"] * num_runs + [""]


def test_a_trainer_whose_batch_is_gone_and_a_loader_without_a_size_are_shown_without_samples():
    def endless(iter):
        trainer = SimpleTrainer(Regression(), [], sgd(Regression()))
        trainer.iter = iter
        return trainer

    assert bar_after(ProgressBar(max_iter=10), 4, endless, time=2.0) == ("Training  40%", "after 4 of 10, eta 0:00:12")
