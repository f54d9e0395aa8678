"""setup_logger, and runs without it."""

import io
import logging
import subprocess
import sys

import pytest

from tests.engine.tiny import Steps
from trainkit.engine.hooks import PeriodicWriter
from trainkit.utils.events import CommonMetricPrinter, get_event_storage
from trainkit.utils.logger import close_logger, setup_logger

NAME = "logger_under_test"


@pytest.fixture(autouse=True)
def close():
    yield
    close_logger(NAME)


def messages(text):
    return [line.split(": ", 1)[1] for line in text.splitlines()]


def test_setting_up_again_never_doubles_a_line_and_closing_ends_it(tmp_path, capsys):
    for output in (tmp_path, tmp_path, tmp_path / "new" / "b.log"):
        logger = setup_logger(output, name=NAME)
    logger.info("once")
    close_logger(NAME)
    logger.info("not after the end")
    assert messages(capsys.readouterr().out) == ["once"]
    assert (tmp_path / "log.txt").read_text() == ""
    assert messages((tmp_path / "new" / "b.log").read_text()) == ["once"]
    assert logger.level == logging.NOTSET
    assert logger.propagate is True


def test_rank_0_writes_to_stdout_and_each_rank_to_its_file(tmp_path, capsys, caplog):
    for rank in (0, 1, 12):
        setup_logger(tmp_path, rank, name=NAME).info("rank %d", rank)
    setup_logger(tmp_path, name=NAME, configure_stdout=False).info("appended \ud800")
    setup_logger(tmp_path, configure_stdout=False).info("of another logger")
    assert messages(capsys.readouterr().out) == ["rank 0"]
    assert {file.name: messages(file.read_text()) for file in tmp_path.iterdir()} == {
        "log.txt": ["rank 0", "appended \\ud800", "of another logger"],
        "log.txt.rank1": ["rank 1"],
        "log.txt.rank12": ["rank 12"],
    }
    assert caplog.messages == []
    setup_logger(name=NAME, configure_stdout=False, enable_propagation=True).info("passed on")
    assert caplog.messages == ["passed on"]


def test_a_line_names_the_level_and_in_the_file_or_with_a_short_name_the_logger(tmp_path, capsys):
    logger = setup_logger(tmp_path, name=NAME, stdout_level="INFO").getChild("a.part")
    logger.debug("only in the file")
    logger.warning("a %s", "b")
    assert capsys.readouterr().out[15:] == "] WARNING: a b\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[15:] for line in lines] == [
        f" {NAME}.a.part]: only in the file",
        f" {NAME}.a.part] WARNING: a b",
    ]
    setup_logger(name=NAME, abbrev_name="short")
    logger.info("text")
    assert capsys.readouterr().out[15:] == " short.a.part]: text\n"


def test_stdout_breaks_a_message_of_one_line_between_its_fields_or_words(tmp_path, capsys):
    logger = setup_logger(tmp_path, name=NAME)
    exactly = "a" * 49 + " " + "b" * 52  # with "[11/29 17:00:00]: " 120 columns
    fields = f"after 1/2  {'loss: 0.25  ' * 8}lr: 0.001"
    path = "/long" * 30
    table = "Results:\n" + "a column  " * 20
    for message in (exactly, exactly + "c", fields, f"Saving to {path}, after 1 iteration", table):
        logger.info(message)
    lines = capsys.readouterr().out.split("\n")
    heads = [line.startswith("[") for line in lines]
    lines = [line[18:] if has_head else line for line, has_head in zip(lines, heads, strict=True)]
    assert lines == [
        exactly,
        "a" * 49,
        "    " + "b" * 52 + "c",
        f"after 1/2  {'loss: 0.25  ' * 7}".rstrip(),
        "    loss: 0.25  lr: 0.001",
        "Saving to",
        f"    {path},",
        "    after 1 iteration",
        "Results:",
        "a column  " * 20,
        "",
    ]
    assert len(exactly) + len("[11/29 17:00:00]: ") == 120
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 6  # not broken


def test_a_run_goes_on_if_stdout_cannot_be_written_and_stderr_says_so(
    tmp_path, capsys, monkeypatch
):
    class Full(io.StringIO):
        def flush(self):
            raise BrokenPipeError(32, "Broken pipe")

    logger = setup_logger(tmp_path, name=NAME)
    monkeypatch.setattr(sys, "stdout", Full())
    logger.info("text")
    assert "Broken pipe" in capsys.readouterr().err
    assert messages((tmp_path / "log.txt").read_text()) == ["text"]


@pytest.mark.parametrize(
    ("handlers", "lines"),
    [
        ([logging.NullHandler()], []),
        ([], ["Training starts after 0 of 2 iterations", "after 2/2  a: 1"]),
    ],
)
def test_a_run_shows_its_lines_if_nobody_has_configured_logging(
    handlers, lines, monkeypatch, capsys
):
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    hooks = [PeriodicWriter([CommonMetricPrinter(2)])]
    Steps(hooks, lambda iter: get_event_storage().put_scalar("a", 1.0)).train(0, 2)
    assert messages(capsys.readouterr().out) == lines


def test_a_level_that_the_program_has_set_stays():
    logger = logging.getLogger("own_level")
    logger.setLevel(logging.WARNING)
    try:
        assert setup_logger(name="own_level").level == logging.WARNING
    finally:
        close_logger("own_level")
        logger.setLevel(logging.NOTSET)


def test_a_missing_fcntl_says_which_platforms_are_supported():
    # portalocker has its own way on Windows
    code = "import sys, portalocker; sys.modules['fcntl'] = None; import trainkit.engine"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("ImportError: trainkit runs on Linux and macOS")
