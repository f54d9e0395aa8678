import io
import multiprocessing
import re
import sys
import threading

from tests.utils.terminal import Terminal, showing_bars
from trainkit.utils.logger import NOT_ON_TERMINAL, close_logger, setup_logger
from trainkit.utils.progress import Bar, are_bars_shown, show_bars


def test_a_bar_says_how_far_it_is_and_what_it_was_told():
    with showing_bars() as terminal:
        bar = Bar(800, "[Epoch 2/43]", initial=20)
        bar.describe("[Epoch 3/43]", ["loss 0.5"])
        bar.go_to(40)
        bar.close()
        line, end = terminal.lines()
        assert line.startswith("[Epoch 3/43]   5%|")
        assert line.endswith("| after 40 of 800, loss 0.5")
        assert end == ""


def test_a_bar_without_a_known_end_counts():
    with showing_bars() as terminal:
        bar = Bar(None, "Evaluating a stream")
        bar.go_to(7)
        bar.close()
        assert terminal.lines()[0].startswith("Evaluating a stream: 7it [")


def test_a_bar_that_does_not_stay_leaves_nothing():
    with showing_bars() as terminal:
        bar = Bar(2, "Evaluating", stays=False)
        bar.go_to(2)
        assert terminal.lines()[0].startswith("Evaluating   0%|")
        bar.close()
        assert "".join(terminal.lines()) == ""


def test_log_lines_stand_above_the_bars():
    with showing_bars() as terminal:
        logger = setup_logger(color=False)
        outer, inner = Bar(2, "Training"), Bar(2, "Evaluating", stays=False)
        logger.info("one line")
        outer.go_to(1)
        logger.info("another")
        inner.close()
        outer.close()
        close_logger()
        first, second, bar, end = terminal.lines()
        assert (first.split(": ")[1], second.split(": ")[1]) == ("one line", "another")
        assert (bar[:14], end) == ("Training  50%|", "")


def test_a_line_that_a_bar_shows_goes_to_files_only(tmp_path):
    with showing_bars() as terminal:
        logger = setup_logger(tmp_path, color=False)
        logger.info("shown by a bar", extra=NOT_ON_TERMINAL)
        close_logger()
        assert terminal.getvalue() == ""
        assert (tmp_path / "log.txt").read_text().endswith("shown by a bar\n")


def test_there_are_no_bars_unless_they_are_asked_for_on_a_terminal(monkeypatch):
    assert not are_bars_shown()
    for stdout, term, shown in [
        (io.StringIO(), "xterm", False),
        (Terminal(), "dumb", False),
        (Terminal(), "xterm", True),
    ]:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setenv("TERM", term)
        show_bars(True)
        assert are_bars_shown() == shown
        bar = Bar(1, "Training")
        bar.go_to(1)
        bar.close()
        assert bool(stdout.getvalue()) == shown
    show_bars(False)
    assert not are_bars_shown()


def test_a_forked_process_shows_none():
    with showing_bars():

        def look(results):
            results.put(are_bars_shown())

        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        process = context.Process(target=look, args=(results,))
        process.start()
        process.join()
        assert results.get() is False
        assert are_bars_shown()


def test_a_line_of_a_forked_process_does_not_stand_in_a_bar():
    def log(results):
        setup_logger(color=False).info("from a worker")
        results.put(sys.stdout.getvalue())

    with showing_bars():
        bar = Bar(2, "Training")
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        process = context.Process(target=log, args=(results,))
        process.start()
        written = results.get()
        process.join()
        bar.close()
    assert re.search(r"Training   0%\|.*\r\x1b\[K\[.*\]: from a worker\n$", written)


def test_without_stdout_nothing_is_shown_and_nothing_breaks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    show_bars(True)
    assert not are_bars_shown()
    setup_logger(tmp_path, color=True).info("in the file")
    close_logger()
    assert (tmp_path / "log.txt").read_text().endswith("in the file\n")
    assert capsys.readouterr().err == ""


def test_a_bar_starts_no_thread():
    with showing_bars():
        before = threading.enumerate()
        bar = Bar(2, "Training")
        assert threading.enumerate() == before
        bar.close()


def test_a_notebook_shows_one_bar():
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    with showing_bars(notebook):
        outer, inner = Bar(2, "Training"), Bar(2, "Evaluating")
        inner.close()
        outer.close()
    assert "Training" in notebook.getvalue()
    assert "Evaluating" not in notebook.getvalue()
