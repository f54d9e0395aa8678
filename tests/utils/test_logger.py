"""setup_logger, and runs without it."""

import io
import logging
import sys

import pytest

from tests.engine.tiny import Steps
from trainkit.engine.hooks import PeriodicWriter
from trainkit.utils.events import CommonMetricPrinter, get_event_storage
from trainkit.utils.logger import (
    close_logger,
    setup_logger,
)

NAME = "logger_under_test"


@pytest.fixture(autouse=True)
def close():
    yield
    close_logger(NAME)
    close_logger()


def messages(text):
    return [line.split(": ", 1)[1] for line in text.splitlines()]


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {}), ({}, {"color": False}), ({"output": True}, {"output": True}), ({"output": True}, {"output": "b.log"})],
)
def test_setting_up_again_never_doubles_a_line(tmp_path, capsys, first, second):
    for arguments in (first, second):
        if "output" in arguments:
            output = tmp_path if arguments["output"] is True else tmp_path / arguments["output"]
            arguments = arguments | {"output": output}
        logger = setup_logger(name=NAME, **arguments)
    logger.info("once")
    assert messages(capsys.readouterr().out) == ["once"]
    assert [messages(file.read_text()) for file in tmp_path.iterdir() if file.read_text()] in ([], [["once"]])


def test_rank_0_writes_to_stdout_and_each_rank_to_its_file(tmp_path, capsys):
    for rank in (0, 1, 12):
        setup_logger(tmp_path, rank, name=NAME).info("rank %d", rank)
    assert messages(capsys.readouterr().out) == ["rank 0"]
    assert {file.name: messages(file.read_text()) for file in tmp_path.iterdir()} == {
        "log.txt": ["rank 0"],
        "log.txt.rank1": ["rank 1"],
        "log.txt.rank12": ["rank 12"],
    }


def test_a_file_can_be_named_and_is_appended_to(tmp_path):
    path = tmp_path / "new" / "train.log"
    setup_logger(str(path), name=NAME, configure_stdout=False).info("one")
    close_logger(NAME)
    setup_logger(path, name=NAME, configure_stdout=False).info("two")
    assert messages(path.read_text()) == ["one", "two"]


def test_two_loggers_share_a_file(tmp_path):
    setup_logger(tmp_path, name=NAME, configure_stdout=False).info("one")
    setup_logger(tmp_path, configure_stdout=False).info("two")
    logging.getLogger(NAME).info("three")
    assert messages((tmp_path / "log.txt").read_text()) == ["one", "two", "three"]


def test_each_line_is_in_the_file_at_once_and_names_logger_and_level(tmp_path):
    logger = setup_logger(tmp_path, name=NAME, abbrev_name="short", configure_stdout=False)
    path = tmp_path / "log.txt"
    logger.getChild("part").debug("a %s", "b")
    assert path.read_text()[15:] == " short.part]: a b\n"
    logger.warning("careful")
    assert path.read_text().splitlines()[1][15:] == " short] WARNING: careful"


def test_stdout_is_configured_only_if_wanted(capsys):
    setup_logger(name=NAME, configure_stdout=False).info("silent")
    assert capsys.readouterr().out == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stdout", "color", "coloured"),
    [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)],
)
def test_colours_go_to_a_terminal_only(tmp_path, monkeypatch, stdout, color, coloured):
    logger = setup_logger(tmp_path, name=NAME, color=color)
    monkeypatch.setattr(sys, "stdout", stdout)
    logger.error("text")
    assert ("\x1b[" in stdout.getvalue()) == coloured
    assert "\x1b[" not in (tmp_path / "log.txt").read_text()


def test_propagation_is_off_unless_wanted(caplog):
    setup_logger(name=NAME, configure_stdout=False).info("kept")
    setup_logger(name=NAME, configure_stdout=False, enable_propagation=True).info("passed on")
    assert caplog.messages == ["passed on"]


def test_closing_leaves_the_logger_as_found(tmp_path):
    logger = logging.getLogger(NAME)
    own = logging.NullHandler()
    logger.addHandler(own)
    logger.setLevel(logging.ERROR)
    for _ in range(2):
        setup_logger(tmp_path, name=NAME)
    close_logger(NAME)
    close_logger(NAME)
    assert (logger.handlers, logger.level, logger.propagate) == ([own], logging.ERROR, True)
    logger.removeHandler(own)
    logger.setLevel(logging.NOTSET)


def test_a_folder_that_cannot_be_written_is_named_and_the_old_log_stays(tmp_path):
    logger = setup_logger(tmp_path / "good", name=NAME, configure_stdout=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/below"):
        setup_logger(tmp_path / "file" / "below", name=NAME)
    logger.info("still here")
    assert messages((tmp_path / "good" / "log.txt").read_text()) == ["still here"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe")])
def test_a_stdout_or_file_that_cannot_be_written_is_named_once_on_stderr_and_the_run_continues(
    tmp_path, capsys, monkeypatch, error
):
    class Full(io.StringIO):
        name = "<stdout>"

        def flush(self):
            raise error

    logger = setup_logger(tmp_path, name=NAME)
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(logger.handlers[0]._file, "flush", Full().flush)
    for text in ("one", "two"):
        logger.info(text)
    assert capsys.readouterr().err.splitlines() == [
        f"{name} cannot be written, the run continues: {error}" for name in (tmp_path / "log.txt", "<stdout>")
    ]


def test_stdout_shows_the_last_word_of_the_name_and_the_file_all_of_it(tmp_path, capsys):
    logger = setup_logger(tmp_path, name=NAME).getChild("a.part")
    logger.info("text")
    assert capsys.readouterr().out[15:] == " part]: text\n"
    assert (tmp_path / "log.txt").read_text()[15:] == f" {NAME}.a.part]: text\n"
    setup_logger(name=NAME, abbrev_name="short")
    logger.info("text")
    assert capsys.readouterr().out[15:] == " short.a.part]: text\n"


def test_a_line_that_is_no_unicode_is_logged(tmp_path, capsys):
    setup_logger(tmp_path, name=NAME, configure_stdout=False).info("lone \ud800")
    assert messages((tmp_path / "log.txt").read_text()) == ["lone \\ud800"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_run_shows_its_lines_if_nobody_has_configured_logging(monkeypatch, capsys, is_configured):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()] * is_configured)
    Steps([PeriodicWriter([CommonMetricPrinter(2)])], lambda iter: get_event_storage().put_scalar("a", 1.0)).train(0, 2)
    lines = [] if is_configured else ["Training from iteration 0 to 2", "after 2 of 2 iterations  a: 1 "]
    assert messages(capsys.readouterr().out) == lines
