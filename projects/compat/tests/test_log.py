"""Log lines that do not repeat."""

import logging

from trainkit.projects.compat import log

from trainkit.utils.logger import create_small_table, log_every_n, log_every_n_seconds, log_first_n


def test_the_first_n_of_a_line_or_of_a_message_are_logged(caplog):
    for i in range(4):
        log_first_n(logging.WARNING, f"line {i}", 2)
        log_first_n(logging.WARNING, f"message {i % 2}", key="message")
        log_first_n(logging.WARNING, f"both {i % 2}", key=("caller", "message"))
    log_first_n(logging.WARNING, "both 0", key=("message", "caller"))
    log_first_n(logging.WARNING, "message 0", key="message")
    logged = ["line 0", "line 1", "message 0", "message 1", "both 0", "both 0", "both 1"]
    assert sorted(caplog.messages) == sorted(logged)


def test_every_nth_is_logged_and_a_line_again_only_after_n_seconds(caplog, monkeypatch):
    clock = iter([100.0, 104.0, 105.0, 109.0, 110.0])
    monkeypatch.setattr(log.time, "monotonic", lambda: next(clock))
    for i in range(5):
        log_every_n(logging.WARNING, f"nth {i}", 3)
        log_every_n_seconds(logging.WARNING, f"after seconds {i}", 5)
    assert caplog.messages == [
        "nth 0",
        "after seconds 0",
        "after seconds 2",
        "nth 3",
        "after seconds 4",
    ]


def test_such_lines_come_from_the_caller_or_a_named_logger(caplog):
    log_first_n(logging.WARNING, "a")
    log_every_n(logging.WARNING, "b", name="other")
    assert [(r.name, r.filename) for r in caplog.records] == [
        (__name__, "test_log.py"),
        ("other", "test_log.py"),
    ]


def test_a_small_table_has_one_row():
    assert create_small_table({"top1": 0.98765, "n": 3}) == (
        "|  top1  |  n  |\n|:------:|:---:|\n| 0.988  |  3  |"
    )
